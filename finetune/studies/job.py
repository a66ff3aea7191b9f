"""One run of a study as a process that may be killed at any time, and engines that start runs.

`python -m finetune.studies.job FOLDER` executes the stages in the folder's job.json, each a command
of this project, and writes a marker file for each finished one. All runs are executed by
`do_here` on this machine's devices, or by `do_on_ray` as tasks of a cluster.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import children, console
from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from data_prep.common.files import write_json
from data_prep.engines import connected_ray, ended_on_ray
from pretrain.processes.gpus import environment

JOB = "job.json"
LOG = "log.txt"
EVALUATION = "evaluation"
"""Prefix of the files that `evaluate` writes, one for each corpus of a mixture."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A named command."""

    name: str
    arguments: list[str]
    """Of `zeroclap`."""
    makes: str = ""
    """The folder that the command makes as a whole; empty: it continues from what it finds."""


def write(folder: Path, stages: Sequence[Stage]) -> None:
    """Write the stages of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / JOB, [dataclasses.asdict(stage) for stage in stages])


def start(folder: Path, environ: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """Start the process of a run, whose output is appended to its log; see `children.start`."""
    with (folder / LOG).open("ab") as log:
        return children.start(["finetune.studies.job", str(folder)], environ, log)


def stages_left(folder: Path) -> list[Stage]:
    """Return the stages of a run that are not finished."""
    stages = [Stage(**each) for each in json.loads((folder / JOB).read_text(encoding="utf-8"))]
    return [stage for stage in stages if not _mark(folder, stage).exists()]


def _mark(folder: Path, stage: Stage) -> Path:
    return folder / f"{stage.name}.done"


@console.survive_broken_pipe()
def do(folder: Path) -> int:
    """Execute the unfinished stages; return the exit code of the first that fails.

    Wait for another process that still works on the run: it may be saving. If this process is asked
    to stop, it stops the command first; if it is killed, the command is asked to stop and holds the
    lock until it ends.
    """
    with (folder / "lock").open("a") as lock, contextlib.suppress(KeyboardInterrupt):
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stage in stages_left(folder):
            print(f"$ zeroclap {shlex.join(stage.arguments)}", flush=True)
            if stage.makes:  # by a process that was killed before it could mark the stage
                shutil.rmtree(stage.makes, ignore_errors=True)
            if code := children.run(["finetune.zeroclap", *stage.arguments], [lock.fileno()]):
                return code
            _mark(folder, stage).touch()
        return EXIT_DONE
    return EXIT_INTERRUPTED


Ended = Callable[[Path, int], object]
"""Called with the folder of a run that has ended, and its exit code."""


def do_here(
    folders: Sequence[Path], ended: Ended, devices: Sequence[Sequence[str]], threads: int
) -> None:
    """Execute runs as processes of this machine; return when all have ended.

    At Ctrl-C or SIGTERM it stops the runs and waits for them.

    Args:
        folders: of the runs.
        ended: called after each run.
        devices: the GPUs of each run that may be in progress at once (`finetune.starting.slots`).
        threads: of each rank.
    """

    def begin(folder: Path, slot: int) -> subprocess.Popen[bytes]:
        return start(folder, environment(devices[slot], threads))

    children.run_in_slots(folders, len(devices), begin, lambda folder, code, _: ended(folder, code))


def do_on_ray(folders: Sequence[Path], ended: Ended, ranks: int, jobs: int) -> None:
    """Execute each run as a task of a Ray cluster, or else of a local Ray; return as `do_here`.

    All machines have zeroclap installed, and see the study's files under the same paths. A task
    that loses its machine is repeated on another one, where its run continues. Ray ends the tasks
    when this process ends, and they stop their runs.

    Args:
        folders: of the runs.
        ended: called after each run.
        ranks: of a run: the GPUs that it takes, or cores in a cluster without GPUs.
        jobs: runs at once; 0: as many as the cluster has devices for.

    Raises:
        ValueError: no machine has the devices of a run.
    """
    with connected_ray(children.usable_cores()) as ray:
        task = ray.remote(**_devices(ray, ranks))(_do)

        def begin(folder: Path) -> Any:  # noqa: ANN401 - a reference
            return task.remote(str(folder.resolve()), str(Path.cwd()))

        for folder, done in ended_on_ray(ray, folders, jobs or len(folders), begin):
            ended(folder, _exit_code(ray, done, folder))


def _devices(ray: Any, ranks: int) -> dict[str, int]:  # noqa: ANN401 - a module
    """Return the resources that Ray reserves for a run."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    device = "GPU" if any(machine.get("GPU") for machine in machines) else "CPU"
    most = max((int(machine.get(device, 0)) for machine in machines), default=0)
    if most < ranks:
        raise ValueError(
            f"--engine ray: a run has {ranks} ranks, and no machine of the cluster has more than "
            f"{most} {device}s"
        )
    return {f"num_{device.lower()}s": ranks}


def _do(folder: str, directory: str) -> int:
    """Execute a run on the machine that Ray has chosen, and return its exit code."""
    os.chdir(directory)  # paths in the run's commands may be relative
    return start(Path(folder)).wait()


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
