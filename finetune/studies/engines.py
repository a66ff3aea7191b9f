"""Where the runs of a study are done: on this machine's devices. on_ray.py has tasks of Ray."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from data_prep.common import children
from finetune.studies import job
from pretrain.processes.gpus import VARIABLE

Ended = Callable[[Path, int], object]
"""Told the folder of a run that has ended, and its exit code."""


class Engine(Protocol):
    """Does the runs of a study."""

    def __call__(self, folders: Sequence[Path], ended: Ended) -> None:
        """Do the runs, in any order, and return when all have ended."""


@dataclasses.dataclass(frozen=True)
class Local:
    """Processes of this machine."""

    devices: Sequence[Sequence[str]]
    """The GPUs of each run that may be in progress at once (`finetune.runs.slots`)."""
    threads: int
    """Of each rank."""

    def __call__(self, folders: Sequence[Path], ended: Ended) -> None:
        """As `Engine`; ended by Ctrl-C or SIGTERM, it stops the runs and waits for them."""
        children.run_in_slots(
            folders, len(self.devices), self._start, lambda folder, code, _: ended(folder, code)
        )

    def _start(self, folder: Path, slot: int) -> subprocess.Popen[bytes]:
        environment = children.environment() | {"OMP_NUM_THREADS": str(self.threads)}
        if gpus := self.devices[slot]:
            environment[VARIABLE] = ",".join(gpus)
        return job.start(folder, environment=environment)
