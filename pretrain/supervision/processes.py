"""The processes of a run on this machine: found, ended, and what they may leave behind.

Every process that a supervisor starts inherits a mark in its environment, whatever starts it in
between and whoever its parent becomes. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

RUN_VARIABLE = "ZEROCLAP_RUN"
"""Environment variable that marks every process of a run, so that none is left behind."""
_PR_SET_CHILD_SUBREAPER = 36
_LAST_WAIT = 30.0
"""Seconds for the system to end what was killed."""


def mark(run: Path, node: int = 0) -> str:
    """What RUN_VARIABLE holds in a run's processes; agents of one machine have their own each."""
    return f"{run.resolve()}#{node}" if node else str(run.resolve())


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a run."""

    pid: int
    environment: Mapping[str, str]
    stopped: bool = False
    """By SIGSTOP or its like; a debugger's stop is not meant."""

    @property
    def rank(self) -> str | None:
        """Of a rank and of what it started; `None` of a launcher, and below srun of every process.

        Slurm's own variable says nothing here: what runs in a job inherits the job's.
        """
        return self.environment.get("RANK")


def members(run: Path, node: int = 0) -> list[Member]:
    """Processes of this machine that carry a run's mark, ours and dead ones left out."""
    import psutil

    wanted, found = mark(run, node), []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid():
                continue
            environment = process.environ()
            if environment.get(RUN_VARIABLE) == wanted:
                stopped = process.status() == psutil.STATUS_STOPPED
                found.append(Member(process.pid, environment, stopped))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def end_all(run: Path, grace_seconds: float = 10.0, node: int = 0, launcher: int = 0) -> None:
    """End every process of a run, politely and then not, and make sure that none is left.

    The launcher leaves its ranks alive when it is terminated, so each is told by itself; one that
    was stopped is woken, for it cannot hear otherwise.

    Args:
        run: the run's folder.
        grace_seconds: between the polite way and the other.
        node: whose processes, where several agents share a machine.
        launcher: process id of one that the caller waits for by itself.

    Raises:
        TimeoutError: some could not be ended; they are named.
    """
    import psutil

    started, message = time.monotonic(), signal.SIGTERM
    known: dict[int, psutil.Process] = {}
    while True:
        for member in members(run, node):
            with contextlib.suppress(psutil.NoSuchProcess):
                known.setdefault(member.pid, psutil.Process(member.pid))
        # One on its way out loses its environment first, and its locks later.
        left = [pid for pid, process in known.items() if _is_alive(process)]
        bury({*known} - {launcher})
        if not left:
            return
        waited = time.monotonic() - started
        if waited > grace_seconds:
            message = signal.SIGKILL
        if waited > grace_seconds + _LAST_WAIT:
            pids = ", ".join(map(str, left))
            raise TimeoutError(f"{run}: processes {pids} of this run cannot be ended, even killed")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, message)
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def adopt_orphans() -> None:
    """Become the parent of whatever our launchers leave behind, where the system can (Linux).

    In a container there may be nobody else to `bury` them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury(pids: Iterable[int]) -> None:
    """Let the dead among these processes go that are children of ours by now."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def clear_build_locks(folder: Path) -> list[Path]:
    """Delete the locks of torch's extension builds whose builder is gone.

    A build that is killed leaves its lock, on which every later one waits for ever. A builder keeps
    its lock open, so that one which no process of this machine has open has no builder; only the
    lock's owner's processes are looked at, for no other user could have made it. Another machine's
    builder is not seen: each machine needs an extensions folder of its own.

    Args:
        folder: of extensions, as `extensions_folder` finds it.

    Returns:
        What was deleted.
    """
    locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    stale = [lock for lock in locks if lock.is_file() and not _is_open(lock)]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


def _is_open(path: Path) -> bool:
    """Whether a process of the file's owner has it open; True where that cannot be known."""
    import psutil

    owner, name = path.stat().st_uid, str(path.resolve())
    for process in psutil.process_iter():
        try:
            if process.uids().real == owner and any(f.path == name for f in process.open_files()):
                return True
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            if process.pid != 1:  # what nobody may look into, and builds nothing
                return True
    return False


def extensions_folder(environ: Mapping[str, str]) -> Path:
    """Where torch builds extensions: TORCH_EXTENSIONS_DIR, or its folder in the user's cache."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")
