"""The runs of a study as tasks of a Ray cluster: one engine (engines.py)."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.common.exit_codes import EXIT_FAILED
from data_prep.engines import connected_ray
from finetune.studies import job
from finetune.studies.engines import Ended


@dataclasses.dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster, or of this machine where none is running, one a run.

    All machines have zeroclap installed, and see the study's files under the same paths. A task
    that loses its machine is repeated on another one, where its run continues.
    """

    ranks: int
    """Of a run: the GPUs that it takes, or cores in a cluster without GPUs."""
    jobs: int
    """Runs at once; 0: as many as the cluster has devices for."""

    def __call__(self, folders: Sequence[Path], ended: Ended) -> None:
        """As `Engine`; Ray ends the tasks when this process ends, and they stop their runs.

        Raises:
            ValueError: no machine of the cluster has the devices of a run.
        """
        waiting, running = deque(folders), dict[Any, Path]()
        with connected_ray(len(os.sched_getaffinity(0))) as ray:
            task = ray.remote(**self._devices(ray))(_do)
            while waiting or running:
                while waiting and len(running) < (self.jobs or len(folders)):
                    folder = waiting.popleft()
                    running[task.remote(str(folder.resolve()), str(Path.cwd()))] = folder
                for done in ray.wait([*running])[0]:
                    folder = running.pop(done)
                    ended(folder, _exit_code(ray, done, folder))

    def _devices(self, ray: Any) -> dict[str, int]:  # noqa: ANN401 - a module
        """Return what Ray has to give a run."""
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        device = "GPU" if any(machine.get("GPU") for machine in machines) else "CPU"
        most = max((int(machine.get(device, 0)) for machine in machines), default=0)
        if most < self.ranks:
            raise ValueError(
                f"--engine ray: a run has {self.ranks} ranks, and no machine of the cluster has "
                f"more than {most} {device}s"
            )
        return {f"num_{device.lower()}s": self.ranks}


def _do(folder: str, directory: str) -> int:
    """Do a run on the machine that Ray has chosen, and return its exit code."""
    return job.start(Path(folder), directory=Path(directory)).wait()


def _exit_code(ray: Any, done: Any, folder: Path) -> int:  # noqa: ANN401 - a module, a reference
    try:
        return int(ray.get(done))
    except ray.exceptions.RayError as error:  # the task came to no end, so the log does not say why
        with (folder / job.LOG).open("a", encoding="utf-8") as log:
            log.write(f"Ray: {error}\n")
        return EXIT_FAILED
