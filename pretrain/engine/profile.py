"""A trace of a few steps, by torch.profiler, that Perfetto opens (`profile.steps`).

Rank 0 traces. It is slower while it does, and the other ranks wait for it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

FOLDER = "profile"
"""Folder of the traces in a run's folder."""


class Profiler:
    """Traces one window of an attempt's steps."""

    def __init__(
        self,
        window: Sequence[int],
        run: Path,
        attempt: int,
        say: Callable[[str], object],
        writing: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        """Trace nothing yet.

        Args:
            window: the first step that is traced, and the first that no longer is; empty: none.
            run: the run's folder.
            attempt: its number.
            say: receives messages.
            writing: given the number of updates done; entered while a trace is written.
        """
        self._window, self._say, self._writing = range(*(window or (0,))), say, writing
        self._folder, self._attempt = run / FOLDER, attempt
        self._profile: Any = None  # torch's has no complete annotations
        self._steps = 0

    def advance(self, steps: int) -> None:
        """Begin or end the window after `steps` updates, if it is time; call it between any two."""
        self._steps = steps
        if steps == self._window.stop:
            self.close()
        if not self._window or steps != self._window.start:
            return
        try:
            profile = torch.profiler.profile()  # of the CPU, and of a GPU where there is one
            profile.start()
        except RuntimeError as error:  # another tool has the device's counters
            self._say(f"WARNING: no trace from step {steps} on: {error}")
            return
        self._profile = profile

    def close(self) -> None:
        """End the trace that goes on, if one does, and write it, which may take long."""
        profile, self._profile = self._profile, None
        if profile:
            with self._writing(self._steps):
                self._write(profile, self._window.start, self._steps)

    def _write(self, profile: Any, first: int, steps: int) -> None:  # noqa: ANN401 - torch's
        name = f"attempt-{self._attempt:03d}-steps-{first}-{steps}.pt.trace.json.gz"
        path = self._folder / name
        try:
            profile.stop()
            self._folder.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as part:
                profile.export_chrome_trace(f"{part}/{name}")
                os.replace(f"{part}/{name}", path)
            self._say(f"trace of steps {first} to {steps - 1}: {path}")
        except (OSError, RuntimeError) as error:  # a trace must not end a run
            self._say(f"WARNING: {path}: not written: {error}")
