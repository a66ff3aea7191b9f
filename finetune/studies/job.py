"""One run of a study as a process that can be killed at any time, and where runs are done.

`python -m finetune.studies.job FOLDER` does the stages that stand in the folder's job.json, one
command of this project after the other, and leaves a file for each that is finished. An engine does
all runs: `local` on this machine's devices, `Ray` as tasks of a cluster.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import children, console
from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED
from data_prep.common.files import write_json
from data_prep.engines import connected_ray
from pretrain.processes.gpus import VARIABLE

JOB = "job.json"
LOG = "log.txt"
EVALUATION = "evaluation"
"""How the names of files begin that `evaluate` writes, one for each corpus of a mixture."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command, by what it is for."""

    name: str
    arguments: list[str]
    """Of `python -m`."""


def write(folder: Path, stages: Sequence[Stage]) -> None:
    """Write what a run has to do."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / JOB, [dataclasses.asdict(stage) for stage in stages])


def start(
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start the process that does a run; what it prints is appended to the run's log.

    Args:
        folder: of the run.
        environment: by default this process's, as its children have it.
        directory: which the paths in the run's commands are relative to; by default this one.
    """
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "finetune.studies.job", str(folder)],
            env=environment or children.environment(),
            cwd=directory,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C does not reach it
            preexec_fn=children.end_with_parent,
        )


def stages_left(folder: Path) -> list[Stage]:
    """Return the stages of a run that are not finished."""
    stages = [Stage(**each) for each in json.loads((folder / JOB).read_text(encoding="utf-8"))]
    return [stage for stage in stages if not _mark(folder, stage).exists()]


def _mark(folder: Path, stage: Stage) -> Path:
    return folder / f"{stage.name}.done"


@console.survive_broken_pipe()
def do(folder: Path) -> int:
    """Do the stages that are left; returns the exit code of the first that fails.

    Another process that still works on the run is waited for: it may be saving.
    """
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stage in stages_left(folder):
            print(f"$ python -m {shlex.join(stage.arguments)}", flush=True)
            if code := _run(stage.arguments, lock.fileno()):
                return code
            _mark(folder, stage).touch()
    return EXIT_DONE


def _run(arguments: Sequence[str], lock: int) -> int:
    """Run a command; a request to stop is passed on to it, and it is waited for.

    If this process is killed the command is asked to stop. Until it has, it holds the lock.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=children.environment(),
        start_new_session=True,
        preexec_fn=children.end_with_parent,
        pass_fds=[lock],
    )
    stopped = list[int]()

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        process.terminate()

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        code = process.wait()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    return 128 + stopped[0] if stopped else code


Ended = Callable[[Path, int], object]
"""Told the folder of a run that has ended, and its exit code."""


Engine = Callable[[Sequence[Path], Ended], None]
"""Does the runs of a study, in any order, and returns when all have ended."""


def local(devices: Sequence[Sequence[str]], threads: int) -> Engine:
    """Return what does the runs as processes of this machine.

    Ended by Ctrl-C or SIGTERM, it stops the runs and waits for them.

    Args:
        devices: the GPUs of each run that may be in progress at once (`finetune.runs.slots`).
        threads: of each rank.
    """

    def begin(folder: Path, slot: int) -> subprocess.Popen[bytes]:
        environment = children.environment() | {"OMP_NUM_THREADS": str(threads)}
        if gpus := devices[slot]:
            environment[VARIABLE] = ",".join(gpus)
        return start(folder, environment=environment)

    return lambda folders, ended: children.run_in_slots(
        folders, len(devices), begin, lambda folder, code, _: ended(folder, code)
    )


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
    return start(Path(folder), directory=Path(directory)).wait()


def _exit_code(ray: Any, done: Any, folder: Path) -> int:  # noqa: ANN401 - a module, a reference
    try:
        return int(ray.get(done))
    except ray.exceptions.RayError as error:  # the task came to no end, so the log does not say why
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"Ray: {error}\n")
        return EXIT_FAILED


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(do(Path(sys.argv[1])))
