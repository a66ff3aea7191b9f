"""Trackers: services that plot the metrics of a run.

A failing tracker never stops a run; the failure is reported once. A tracker is created for one
attempt. Where its service can, it deletes what an earlier attempt logged from this attempt's first
step on, as after a rollback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


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
