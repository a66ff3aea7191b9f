"""The processes of a run on this machine: find them, and end them.

Every process that a supervisor starts inherits an environment variable that names the run, whatever
starts it in between and whoever becomes its parent.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

RUN_VARIABLE = "ZEROCLAP_RUN"
"""Environment variable that marks every process of a run."""
GRACE_SECONDS = 10.0
"""Time that processes have to exit when they are told to, or when their launcher or other ranks
have exited."""
_PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 30.0
"""For the system to end processes that received SIGKILL."""


def mark(run: Path, node: int = 0) -> str:
    """Return the value of RUN_VARIABLE for a run's processes on one of its nodes.

    It contains the node, so that agents that share a machine find their own processes only.
    """
    resolved = _resolved(run.absolute())
    return f"{resolved}#{node}" if node else str(resolved)


@functools.cache
def _resolved(run: Path) -> Path:
    """Return a folder's real path, known later even while its file system is away."""
    return run.resolve()


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a run."""

    process: psutil.Process
    environment: Mapping[str, str]
    stopped: bool = False
    """By SIGSTOP or a similar signal; not by a debugger."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def rank(self) -> str | None:
        """Rank of a rank and its child processes; `None` for a launcher.

        SLURM_PROCID is not used: every process in a Slurm job inherits one.
        """
        return self.environment.get("RANK")


def members(run: Path, node: int = 0) -> list[Member]:
    """Return the living processes of a run on this machine, without this process."""
    wanted, found = mark(run, node), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            environment = process.environ()
            if environment.get(RUN_VARIABLE) == wanted and process.pid != os.getpid():
                stopped = process.status() == psutil.STATUS_STOPPED
                found.append(Member(process, environment, stopped))
    return found


def end_all(
    run: Path, grace_seconds: float = GRACE_SECONDS, node: int = 0, launcher: int = 0
) -> None:
    """End every process of a run: SIGTERM first, SIGKILL after `grace_seconds`.

    Each process gets its own signal, because a terminated launcher leaves its ranks alive. Stopped
    processes are continued, because they cannot handle a signal otherwise.

    Args:
        run: folder of the run.
        grace_seconds: between SIGTERM and SIGKILL.
        node: whose processes to end.
        launcher: process id of a child that the caller reaps itself.

    Raises:
        TimeoutError: Some processes could not be ended; the message names them.
    """
    started, number = time.monotonic(), signal.SIGTERM
    known: dict[int, psutil.Process] = {}
    while True:
        known |= {member.pid: member.process for member in members(run, node)}
        # An exiting process loses its environment first and its file locks later.
        alive = [pid for pid, process in known.items() if is_alive(process)]
        for pid in {*known} - {launcher}:
            with contextlib.suppress(ChildProcessError):  # not our child
                os.waitpid(pid, os.WNOHANG)
        if not alive:
            return
        waited = time.monotonic() - started
        if waited > grace_seconds:
            number = signal.SIGKILL
        if waited > grace_seconds + KILL_SECONDS:
            pids = ", ".join(map(str, alive))
            raise TimeoutError(f"{run}: processes {pids} of this run did not end after SIGKILL")
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not, once its last thread has ended.

    Until then its memory is being freed, and its files stay open and locked.
    """
    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return process.is_running() and not (is_zombie and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return False


def adopt_orphans() -> None:
    """Become the parent of the processes that our launchers leave behind.

    A container may have no init process to reap them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
