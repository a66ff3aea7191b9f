"""Trackers: services that plot the metrics of a run.

A failing tracker never stops a run; the failure is reported once. A tracker is created for one
attempt. Where its service can, it deletes what an earlier attempt logged from this attempt's first
step on, as after a rollback.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Shown:
    """The attempt whose metrics a tracker logs."""

    folder: Path
    """The run's folder."""
    recipe: Mapping[str, Any]
    attempt: int
    """The attempt's number."""
    first_step: int
    """The attempt's first step, from which the curves continue."""
    say: Callable[[str], object]
    """Prints a message for the user."""


class Tracker(Protocol):
    """Logs the metrics of an attempt to a service."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the named values of a step."""

    def text(self, step: int, text: str) -> None:
        """Log a text about a step, such as a rollback."""

    def sync(self, step: int) -> None:
        """Retry if writing has failed; called before the checkpoint after `step` updates."""

    def close(self) -> None:
        """Close the connection, within a few seconds."""
