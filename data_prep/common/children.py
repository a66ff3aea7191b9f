"""The Python processes that a command starts: their environment, and their end.

`python -m` and `python -c` search the working directory first. There a user may have a `torch.py`
or a `pretrain.py` of their own, which would run in place of ours.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

_ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
_CGROUPS, _CGROUP_FILES = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


T = TypeVar("T")
_POLL_SECONDS = 0.1
_OF_A_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"}


def usable_cores() -> int:
    """Return the cores that this process may use, by its affinity and its container's quota."""
    import joblib  # takes a tenth of a second

    return joblib.cpu_count()


def usable_memory() -> tuple[int, int]:
    """Return the bytes of memory that this process may use: in all, and free at most.

    A container or a Slurm job may have less than the machine. Its limit is one of the process's
    cgroup or of one above it (cgroups(7); `memory.max` in version 2).
    """
    machine = psutil.virtual_memory()
    limits, groups = [machine.total], ""
    with contextlib.suppress(OSError):  # gVisor has none
        groups = _CGROUPS.read_text()
    for line in groups.splitlines():
        _, controller, path = line.split(":", 2)
        lowest = _CGROUP_FILES / controller / path[1:]
        for folder in [lowest, *lowest.parents] if controller in ("", "memory") else []:
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # not there, or without a limit
                    limits.append(int((folder / name).read_text()))
    return min(limits), min(machine.available, *limits)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a child process, which imports our packages, not its folder's.

    Without those that make this process a rank, or a task of a Slurm step, as a worker of Ray may
    be: a child is not that rank, and would wait for the others.

    Args:
        environ: variables that the child inherits.
    """
    found = {name: v for name, v in environ.items() if not name.startswith("SLURM_STEP_")}
    found = {name: v for name, v in found.items() if name not in _OF_A_RANK}
    found["PYTHONSAFEPATH"] = "1"
    paths = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path]
    # Python finds site-packages by itself, and after the standard library.
    if _ROOT.name not in ("site-packages", "dist-packages") and str(_ROOT) not in paths:
        paths.insert(0, str(_ROOT))
    return {**found, "PYTHONPATH": os.pathsep.join(paths)} if paths else found


class _Worker(SpawnProcess):
    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self) -> None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super().run()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Context(SpawnContext):
    Process = _Worker


def spawn_context() -> SpawnContext:
    """Return the context that starts the workers of a pool, which inherit this environment.

    A worker ends when its parent process ends, even by SIGKILL, and not before: it would wait for
    work for ever. Ctrl-C reaches every process of a terminal, but the parent handles it: SIGINT is
    blocked in a worker from its beginning, even before Python can ignore it.
    """
    os.environ.update(environment())
    return _Context()


def start(
    words: Sequence[str],
    environ: Mapping[str, str] = {},
    log: IO[bytes] | None = None,
    descriptors: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `python -m` in a session of its own, which a terminal's Ctrl-C does not reach.

    It is terminated when this process is killed.

    Args:
        words: a module and its arguments.
        environ: all its variables; none: this process's `environment`.
        log: where its output goes; by default where this process's goes.
        descriptors: of files that it keeps open.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        env=environ or environment(),
        stdout=log,
        stderr=log,
        pass_fds=descriptors,
        start_new_session=True,
        preexec_fn=_end_with_starter,
    )


def _end_with_starter() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def run(words: Sequence[str], descriptors: Collection[int] = ()) -> int:
    """Start a process, wait for its end and return its exit code; see `start`, `run_in_slots`."""
    (code,) = run_in_slots([words], 1, lambda words, _: start(words, descriptors=descriptors))
    return code


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, Any], Any] = signal.default_int_handler) -> Iterator[None]:
    """Handle requests to stop in this block, by default as KeyboardInterrupt.

    They are Ctrl-C (SIGINT), SIGTERM, SIGUSR1 and the SIGHUP of a closed terminal; those that the
    process was started to ignore, as SIGHUP under nohup, stay ignored.
    """
    numbers = [n for n in _STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@stop_signals()
def run_in_slots(
    tasks: Sequence[T],
    slots: int,
    start: Callable[[T, int], subprocess.Popen[bytes]],
    ended: Callable[[T, int, Sequence[T]], object] = lambda task, code, left: None,
    polled: Callable[[Sequence[T]], object] = lambda tasks: None,
) -> list[int]:
    """Run a process for each task; return their exit codes, as they ended.

    At its own end, by an error or a stop signal, it terminates them and waits for them: they may be
    saving.

    Args:
        tasks: in the order in which they start.
        slots: processes at once.
        start: starts the process of a task in a slot, a number from 0 on.
        ended: called with a task, its exit code, and the tasks that have not ended.
        polled: called several times a second with the tasks in progress.
    """
    waiting, running = deque(tasks), dict[int, tuple[T, subprocess.Popen[bytes]]]()
    codes, asked = list[int](), list[int]()
    try:
        while waiting or running:
            for slot in sorted({*range(slots)} - running.keys())[: len(waiting)]:
                task = waiting.popleft()
                # An exception after the process began would leave it unknown here.
                with stop_signals(lambda number, _: asked.append(number)):
                    running[slot] = task, start(task, slot)
                if asked:
                    raise KeyboardInterrupt
            time.sleep(_POLL_SECONDS)
            for slot, (task, process) in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[slot]
                    codes.append(code)
                    ended(task, code, [*waiting, *(other for other, _ in running.values())])
            polled([task for task, _ in running.values()])
        return codes
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
