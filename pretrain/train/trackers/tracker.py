"""What shows the curves of a run.

None may end a run: what fails is said once. A tracker is made for one attempt, and takes back what
an earlier one showed from the attempt's first step on, as after a rollback, where its service can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Shown:
    """The attempt that a tracker shows."""

    folder: Path
    """The run's."""
    recipe: Mapping[str, Any]
    attempt: int
    """Its number."""
    first_step: int
    """Of the attempt: curves go on from here."""
    say: Callable[[str], object]
    """Receives messages for people."""


class Tracker(Protocol):
    """Shows an attempt."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Show named numbers of a step."""

    def text(self, step: int, text: str) -> None:
        """Show a text about a step, such as a rollback."""

    def sync(self, step: int) -> None:
        """Resume, if writing has failed: a checkpoint after `step` updates is to come."""

    def close(self) -> None:
        """End; must not take longer than a few seconds."""
