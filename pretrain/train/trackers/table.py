"""What shows the curves of a run: the protocol of a tracker, and the table of all.

A tracker is a file with a class, and a line in `config.sections.TRACKERS`, or a class of an
installed package. None may end a run: what fails is said once. A tracker is made for one attempt,
and takes back what an earlier one showed from the attempt's first step on, as after a rollback,
where its service can.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
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


def open_tracker(name: str, shown: Shown, settings: object = None) -> Tracker:
    """Make the tracker of a name; its package is imported now.

    Args:
        name: a key of TRACKERS.
        shown: the attempt.
        settings: `tracker_record` of the recipe: given to the class if it is not None.
    """
    found = TRACKERS[name]
    if not isinstance(found, str):
        return cast(Tracker, _Installed(name, found, shown, settings))
    module, _, kind = found.rpartition(".")
    return cast(Tracker, getattr(importlib.import_module(module), kind)(shown))


class _Installed:
    """A tracker of a package: after its first error it shows nothing more of the attempt."""

    def __init__(self, name: str, kind: Callable[..., Any], shown: Shown, settings: object) -> None:
        self._name, self._say = name, shown.say
        self._tracker: Any = None
        with self._ended_by_errors():
            self._tracker = kind(shown) if settings is None else kind(shown, settings)

    def __getattr__(self, method: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            if self._tracker is not None:
                with self._ended_by_errors():
                    getattr(self._tracker, method)(*arguments)

        return call

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a package raises
            self._tracker = None
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._say(f"WARNING: tracker {self._name} shows no more of this attempt: {reason}")
