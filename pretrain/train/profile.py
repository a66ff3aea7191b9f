"""A trace of a few steps, by torch.profiler, that Perfetto opens (`profile.steps`).

Rank 0 traces. It is slower while it does, and the other ranks wait for it.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from pretrain.records.heartbeat import SAVE
from pretrain.train.setup import Setup

FOLDER = "profile"
"""Folder of the traces in a run's folder."""


class Profiler:
    """Traces one window of an attempt's steps."""

    def __init__(self, setup: Setup, say: Callable[[str], object]) -> None:
        """Trace nothing yet; `say` prints a message."""
        self._setup, self._say = setup, say
        window = [] if setup.group.rank else setup.config.profile.steps
        self._window = range(*(window or (0,)))
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
        else:
            self._profile = profile

    def close(self) -> None:
        """End the trace that goes on, if one does, and write it, which may take long."""
        profile, self._profile = self._profile, None
        if profile:
            with self._setup.supervisor.stage(SAVE, self._steps):
                self._write(profile, self._window.start, self._steps)

    def _write(self, profile: Any, first: int, steps: int) -> None:  # noqa: ANN401 - torch's
        attempt, folder = self._setup.start.attempt, self._setup.run_folder / FOLDER
        name = f"attempt-{attempt:03d}-steps-{first}-{steps}.pt.trace.json.gz"
        path = folder / name
        try:
            profile.stop()
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as part:
                profile.export_chrome_trace(f"{part}/{name}")
                os.replace(f"{part}/{name}", path)
            self._say(f"trace of steps {first} to {steps - 1}: {path}")
        except (OSError, RuntimeError) as error:  # a trace must not end a run
            self._say(f"WARNING: {path}: not written: {error}")
