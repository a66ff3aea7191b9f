"""What shows the curves of a run: the protocol of a tracker, and the table of all.

A tracker is a file with a class, and a line in `config.run.TRACKERS`. None may end a run: what
fails is said once. A tracker is made for one attempt, and takes back what an earlier one showed
from the attempt's first step on, as after a rollback, where its service can.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from pretrain.config.sections import TRACKERS


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


def open_tracker(name: str, shown: Shown) -> Tracker:
    """Make the tracker of a name; its package is imported now."""
    module, _, kind = TRACKERS[name].rpartition(".")
    return cast(Tracker, getattr(importlib.import_module(module), kind)(shown))
