"""A trace of a few steps, by torch.profiler, that Perfetto opens (`profile.steps`).

Rank 0 traces. It is slower while it does, and the other ranks wait for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = "profile"
"""Folder of the traces in a run's folder."""


class Profiler:
    """Traces one window of an attempt's steps."""

    def __init__(
        self, window: Sequence[int], run: Path, attempt: int, say: Callable[[str], object]
    ) -> None:
        """Trace nothing yet.

        Args:
            window: the first step that is traced, and the first that no longer is; empty: none.
            run: the run's folder.
            attempt: its number.
            say: receives messages.
        """
        self._window, self._say = range(*(window or (0,))), say
        self._folder, self._attempt = run / FOLDER, attempt
        self._profile: Any = None  # torch's has no complete annotations
        self.steps = 0
        """Number of updates done."""

    @property
    def is_on(self) -> bool:
        """Whether a trace has begun and not ended."""
        return self._profile is not None

    def ends(self, steps: int) -> bool:
        """Whether the trace ends after `steps` updates."""
        return self.is_on and steps == self._window.stop

    def begin_if_due(self, steps: int) -> None:
        """Begin the window after `steps` updates, if it is time; call it between any two."""
        self.steps = steps
        if not self._window or steps != self._window.start:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            profile = torch.profiler.profile(activities=activities)
            profile.start()
        except RuntimeError as error:  # another tool has the device's counters
            self._say(f"WARNING: no trace from step {steps} on: {error}")
            return
        self._profile = profile

    def end(self, steps: int) -> None:
        """End the trace after `steps` updates, and write it."""
        profile, self._profile = self._profile, None
        first = self._window.start
        name = f"attempt-{self._attempt:03d}-steps-{first}-{steps}.pt.trace.json.gz"
        path = self._folder / name
        part = path.with_name(f"part-{name}")
        try:
            profile.stop()
            self._folder.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(part))
            os.replace(part, path)
            self._say(f"trace of steps {first} to {steps - 1}: {path}")
        except (OSError, RuntimeError) as error:  # a trace must not end a run
            self._say(f"WARNING: {path}: not written: {error}")
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
