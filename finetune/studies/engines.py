"""Where the runs of a study are done: on this machine's devices, or as jobs of Slurm (submitit).

on_ray.py has a third one, tasks of Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from data_prep.common import children
from data_prep.common.exit_codes import EXIT_FAILED
from data_prep.common.files import replace_json
from finetune.studies import job
from pretrain.processes.gpus import VARIABLE

Ended = Callable[[Path, int], object]
"""Told the folder of a run that has ended, and its exit code."""
Tick = Callable[[Sequence[Path]], object]
"""Told now and then which runs are in progress."""
_POLL_SECONDS = 0.2
_SLURM_POLL_SECONDS = 5.0


class Engine(Protocol):
    """Does the runs of a study."""

    def __call__(self, folders: Sequence[Path], ended: Ended, tick: Tick) -> None:
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

    def __call__(self, folders: Sequence[Path], ended: Ended, tick: Tick) -> None:
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
                tick([run.folder for run in running.values()])

    def _start(self, folder: Path, gpus: Sequence[str]) -> _Running:
        environment = children.environment() | {"OMP_NUM_THREADS": str(self.threads)}
        if gpus:
            environment[VARIABLE] = ",".join(gpus)
        return _Running(folder, job.start(folder, environment=environment))


@dataclasses.dataclass
class Command:
    """What a job of Slurm does; submitit sends it there."""

    folder: str
    _process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Do the run and return its exit code."""
        self._process = job.start(
            Path(self.folder), new_session=False, preexec=_ignore_signal_of_submitit
        )
        return self._process.wait()

    def checkpoint(self) -> Any:  # noqa: ANN401 - submitit has no type for it
        """Queue the job again when its time is up: the run saves, and goes on from there.

        submitit calls it in the handler of a signal, so within `wait`, whose lock is held.
        """
        import submitit

        if self._process:
            self._process.terminate()
            with contextlib.suppress(ChildProcessError):  # it has ended
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Command(self.folder))


def _ignore_signal_of_submitit() -> None:
    """Let the signal that a job's time is up reach submitit alone, which asks the run to stop.

    Some clusters send it to every process of a job, and it would kill them.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@dataclasses.dataclass(frozen=True)
class Slurm:
    """Jobs of Slurm, one a run. They go on when this process ends, which then finds them again."""

    folder: Path
    """For submitit's files, on a disk that all machines see."""
    parameters: Mapping[str, Any]
    """Of submitit, such as partition or timeout_min."""

    def __call__(self, folders: Sequence[Path], ended: Ended, tick: Tick) -> None:
        """As `Engine`."""
        import submitit

        executor = submitit.AutoExecutor(folder=self.folder, cluster="slurm")
        executor.update_parameters(**self.parameters)
        jobs: dict[Path, Any] = {}
        for folder in folders:
            known = _known(self.folder, folder)
            if known is None:
                known = self._submit(executor, folder)
                replace_json(folder / "slurm.json", {"job": known.job_id})
            jobs[folder] = known
        while jobs:
            queue = _queue()
            for folder, found in list(jobs.items()):
                if _is_over(found, queue):
                    del jobs[folder]
                    ended(folder, _exit_code(found))
            tick([*jobs])
            time.sleep(_SLURM_POLL_SECONDS)

    def _submit(self, executor: Any, folder: Path) -> Any:  # noqa: ANN401 - submitit's
        import submitit

        try:
            return executor.submit(Command(str(folder.resolve())))
        except submitit.core.utils.FailedJobError as error:
            raise ValueError(f"{folder}: Slurm refuses the job: {error}") from None


def check_slurm() -> None:
    """Refuse where jobs cannot be submitted.

    Raises:
        ValueError: submitit is not installed, or there is no sbatch.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ValueError("--engine slurm: needs submitit; run `pip install 'zeroclap[slurm]'`")
    if shutil.which("sbatch") is None:
        raise ValueError("--engine slurm: there is no sbatch on PATH; is this a login node?")


def _known(logs: Path, folder: Path) -> Any | None:  # noqa: ANN401 - a job of submitit
    """Return the job of a run that an earlier call has submitted, if it is not over."""
    import submitit

    path = folder / "slurm.json"
    if not path.exists():
        return None
    found: Any = submitit.SlurmJob(logs, json.loads(path.read_text(encoding="utf-8"))["job"])
    return None if _is_over(found, _queue()) else found


def _queue() -> set[str] | None:
    """Return the numbers of this user's jobs that wait or run; None if Slurm does not say."""
    command = ["squeue", "--me", "--noheader", "--format=%A"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else {*done.stdout.split()}


def _is_over(found: Any, queue: set[str] | None) -> bool:  # noqa: ANN401 - a job of submitit
    """Return whether a job has a result, or ended without one: it was cancelled, say.

    submitit learns of the latter from sacct alone, which not every cluster has.
    """
    has_left = queue is not None and found.job_id not in queue
    return has_left or _has_result(found)


def _has_result(found: Any) -> bool:  # noqa: ANN401 - a job of submitit
    # A list of the folder is asked of a shared file system anew; a file's absence is remembered.
    path = found.paths.result_pickle
    return path.name in os.listdir(path.parent)


def _exit_code(found: Any) -> int:  # noqa: ANN401 - a job of submitit
    """Return what the command of a job that is over returned; 1 if it came to no end."""
    if not _has_result(found) or found.exception():
        return EXIT_FAILED
    return int(found.result())
