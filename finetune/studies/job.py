"""One run of a study, from training to its last score: a process that can be killed at any time.

`python -m finetune.studies.job FOLDER` does the stages that stand in the folder's job.json, one
command of this project after the other, and leaves a file for each that is finished.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.common import children, console
from data_prep.common.exit_codes import EXIT_DONE
from data_prep.common.files import write_json

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


@console.lasting()
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


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(do(Path(sys.argv[1])))
