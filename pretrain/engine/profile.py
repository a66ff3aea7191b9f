"""Traces of a few steps, by torch.profiler, that Perfetto opens.

Off by default. A rank that traces is slower while it does, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pretrain.config.sections import ProfileConfig

FOLDER = "profile"
"""Folder of the traces in a run's folder."""
MOST_BYTES = 200 << 20
"""A larger file is deleted: viewers cannot open it."""
_POLL_SECONDS = 1.0


class Profiler:
    """Traces windows of one rank's steps: the recipe's, and those that are asked for meanwhile.

    Ranks that trace nothing follow the recipe's window, to know when others write a trace.
    """

    def __init__(
        self,
        config: ProfileConfig,
        run: Path,
        attempt: int,
        rank: int,
        requested: Callable[[], tuple[str, int] | None],
        say: Callable[[str], object],
    ) -> None:
        """Trace nothing yet.

        Args:
            config: the recipe's window, and the ranks that trace.
            run: the run's folder.
            attempt: its number.
            rank: of this process.
            requested: the newest request, as (its name, number of steps), or None. It is called
                once a second, on the ranks that trace.
            say: receives messages.
        """
        self._traces = rank in config.ranks
        self._window = (config.steps[0], config.steps[1]) if config.steps else None
        self._folder = run / FOLDER
        self._attempt, self._rank, self._requested, self._say = attempt, rank, requested, say
        self._next_poll, self._seen = 0.0, ""
        self._profile: Any = None  # torch's has no complete annotations
        self._first = self._end = 0
        self._ended = -1
        self.steps = 0
        """Number of updates done."""

    @property
    def is_on(self) -> bool:
        """Whether a window has begun and not ended."""
        return self._end > 0

    def ends(self, steps: int) -> bool:
        """Whether a window ends after `steps` updates."""
        return 0 < self._end <= steps

    def ended(self, steps: int) -> bool:
        """Whether a window ended after `steps` updates, so that the next step waits for a trace."""
        return steps == self._ended

    def begin_if_due(self, steps: int) -> None:
        """Begin a window after `steps` updates, if it is time for one; call it between any two."""
        self.steps = steps
        if self.is_on:
            return
        end = self._window[1] if self._window and steps == self._window[0] else self._asked(steps)
        if not end:
            return
        self._first, self._end = steps, end
        if self._traces:
            self._begin()

    def _begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            profile = torch.profiler.profile(activities=activities)
            profile.start()
        except RuntimeError as error:  # another tool has the device's counters
            self._say(f"WARNING: no trace from step {self._first} on: {error}")
            return
        self._profile = profile

    def _asked(self, steps: int) -> int:
        """The step before which a trace ends that was asked for since the last look, or 0."""
        if not self._traces or time.monotonic() < self._next_poll:
            return 0
        self._next_poll = time.monotonic() + _POLL_SECONDS
        name, number = self._requested() or ("", 0)
        if name in ("", self._seen):
            return 0
        self._seen = name
        return steps + number

    def end(self, steps: int) -> None:
        """End the window after `steps` updates, and write the trace, if this rank has one."""
        profile, self._profile = self._profile, None
        self._end, self._ended = 0, steps
        if profile is None:
            return
        which = f"attempt-{self._attempt:03d}-steps-{self._first}-{steps}-rank-{self._rank}"
        path = self._folder / f"{which}.pt.trace.json.gz"
        part = path.with_name(f"part-{path.name}")
        try:
            profile.stop()
            self._folder.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(part))
            if (size := part.stat().st_size) > MOST_BYTES:
                limit = f"{MOST_BYTES >> 20} MiB"
                self._say(f"WARNING: {path}: {size >> 20} MiB, above {limit}; trace fewer steps")
            else:
                os.replace(part, path)
                self._say(f"trace of steps {self._first} to {steps - 1}: {path}")
        except (OSError, RuntimeError) as error:  # a trace must not end a run
            self._say(f"WARNING: {path}: not written: {error}")
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
