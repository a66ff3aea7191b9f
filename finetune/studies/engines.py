"""Where the runs of a study are done: on this machine's devices. on_ray.py has tasks of Ray."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from data_prep.common import children
from finetune.studies import job
from pretrain.processes.gpus import VARIABLE

Ended = Callable[[Path, int], object]
"""Told the folder of a run that has ended, and its exit code."""
_POLL_SECONDS = 0.2


class Engine(Protocol):
    """Does the runs of a study."""

    def __call__(self, folders: Sequence[Path], ended: Ended) -> None:
        """Do the runs, in any order, and return when all have ended."""


@dataclasses.dataclass(frozen=True)
class _Running:
    folder: Path
    process: subprocess.Popen[bytes]


@dataclasses.dataclass(frozen=True)
class Local:
    """Processes of this machine."""

    devices: Sequence[Sequence[str]]
    """The GPUs of each run that may be in progress at once (`finetune.runs.slots`)."""
    threads: int
    """Of each rank."""

    def __call__(self, folders: Sequence[Path], ended: Ended) -> None:
        """As `Engine`; ended by Ctrl-C or SIGTERM, it stops the runs and waits for them."""
        waiting = deque(folders)
        with children.terminating(_Running) as running:
            while waiting or running:
                for slot, gpus in enumerate(self.devices):
                    if waiting and slot not in running:
                        folder = waiting.popleft()
                        running[slot] = self._start(folder, gpus)
                time.sleep(_POLL_SECONDS)
                for slot, run in list(running.items()):
                    if (code := run.process.poll()) is not None:
                        del running[slot]
                        ended(run.folder, code)

    def _start(self, folder: Path, gpus: Sequence[str]) -> _Running:
        environment = children.environment() | {"OMP_NUM_THREADS": str(self.threads)}
        if gpus:
            environment[VARIABLE] = ",".join(gpus)
        return _Running(folder, job.start(folder, environment=environment))
