"""Many runs side by side on the devices there are: starts processes, waits, tells how it goes.

A run that collapsed is followed by a retry, one that fails by the next. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from finetune import glue
from finetune.config import LOG, RESULT, RunPlan
from finetune.planning import next_run, result_of
from pretrain.supervision.gpus import visible_gpus
from pretrain.supervision.launch import free_port

_POLL_SECONDS = 0.1
_TELL_SECONDS = 60.0
_TAIL_LINES = 15


def slots(gpus: Sequence[str], cores: int, jobs: int, world_size: int) -> list[list[str]]:
    """The GPUs of each run that may go on at once; none where runs are on the CPU.

    Args:
        gpus: what `visible_gpus` says.
        cores: that we may use.
        jobs: runs at once; 0: as many as there are GPUs, or cores, for their ranks.
        world_size: processes of a run.

    Raises:
        ValueError: a run has more ranks than there are GPUs.
    """
    if not gpus:
        return [[] for _ in range(jobs or max(1, cores // world_size))]
    if world_size > len(gpus):
        raise ValueError(
            f"--world-size {world_size}: there are {len(gpus)} GPUs; accepted: at most as many"
        )
    shares = [list(gpus[first : first + world_size]) for first in range(0, len(gpus), world_size)]
    whole = [share for share in shares if len(share) == world_size]
    return [whole[number % len(whole)] for number in range(jobs or len(whole))]


@dataclasses.dataclass
class _Running:
    plan: RunPlan
    process: subprocess.Popen[bytes]


def run_all(
    output: Path,
    plans: Sequence[RunPlan],
    say: Callable[[str], object],
    *,
    jobs: int = 0,
    world_size: int = 1,
    retries: int = 0,
) -> list[str]:
    """Do the runs; one that fails does not keep others from being done.

    Args:
        output: the folder of the runs' folders.
        plans: of the runs, all prepared, in the order in which they start.
        say: takes a line for the user: of each run that ends, and now and then of those going on.
        jobs: runs at once; 0: as the devices allow.
        world_size: processes of each run.
        retries: how often a run that collapsed is done again.

    Returns:
        The names of the runs that failed.

    Raises:
        ValueError: a run has more ranks than there are GPUs.
    """
    cores = len(os.sched_getaffinity(0))
    places = slots(visible_gpus(), cores, jobs, world_size)[: max(1, len(plans))]
    threads = max(1, cores // (len(places) * world_size))
    waiting, failed, told = deque(plans), list[str](), time.monotonic()
    clock = _Clock()
    with _all_ended() as running:
        while waiting or running:
            for slot, gpus in enumerate(places):
                if waiting and slot not in running:
                    running[slot] = _start(output, waiting.popleft(), gpus, threads, world_size)
            time.sleep(_POLL_SECONDS)
            for run in _ended(running):
                following = None
                if (output / run.plan.name / RESULT).is_file():
                    following = next_run(output, run.plan, retries)
                else:
                    failed.append(run.plan.name)
                if following:
                    following.write(output / following.name)
                    waiting.append(following)
                left = [*waiting, *(other.plan for other in running.values())]
                say(f"[{clock.tick(run.plan, left)}] {_outcome(output, run)}")
            told = _tell(output, running, say, told)
    return failed


def _ended(running: dict[int, _Running]) -> Iterator[_Running]:
    """The runs that have ended, each taken out when its turn comes: till then it counts as left."""
    for slot in [slot for slot, run in running.items() if run.process.poll() is not None]:
        yield running.pop(slot)


def _tell(
    output: Path, running: dict[int, _Running], say: Callable[[str], object], told: float
) -> float:
    """Say how far runs are, if that was long ago; returns when it was said last."""
    if time.monotonic() - told < _TELL_SECONDS:
        return told
    for run in running.values():
        say(f"    {run.plan.name}: {_tail(output, run, 1)}")
    return time.monotonic()


class _Clock:
    """How many runs are done, and the time that others take, told by the characters they read."""

    def __init__(self) -> None:
        self._started, self._ended, self._work = time.monotonic(), 0, 0

    def tick(self, ended: RunPlan, left: Sequence[RunPlan]) -> str:
        """In words, after a run has ended; the time where some are left."""
        self._ended += 1
        self._work += ended.work
        count = f"{self._ended}/{self._ended + len(left)}"
        if not left or not self._work:
            return count
        rate = (time.monotonic() - self._started) / self._work
        minutes = rate * sum(plan.work for plan in left) / 60
        return f"{count}, {f'about {minutes:.0f} min' if minutes >= 1 else 'under a minute'} left"


@contextmanager
def _all_ended() -> Iterator[dict[int, _Running]]:
    """Runs by slot; whatever happens to us, even SIGTERM, those still there are ended."""
    running: dict[int, _Running] = {}
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield running
    finally:
        for run in running.values():
            run.process.terminate()
        for run in running.values():
            run.process.wait()
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start(
    output: Path, plan: RunPlan, gpus: Sequence[str], threads: int, world_size: int
) -> _Running:
    # Whatever launcher started us, each run is a group of its own.
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in foreign}
    port = str(free_port())
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": str(threads),
    }
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    folder = output / plan.name
    # torchrun ends all ranks when one fails.
    torchrun = [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={world_size}",
        f"--master-port={port}",
    ]
    launcher = torchrun if world_size > 1 else []
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "finetune.train", str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return _Running(plan, process)


def _tail(output: Path, run: _Running, count: int) -> str:
    """The last lines of a run's log."""
    log = (output / run.plan.name / LOG).read_text(encoding="utf-8", errors="replace")
    return "\n    ".join(log.splitlines()[-count:])


def _outcome(output: Path, run: _Running) -> str:
    folder = output / run.plan.name
    if not (folder / RESULT).is_file():
        code, tail = run.process.returncode, _tail(output, run, _TAIL_LINES)
        return f"{run.plan.name}: failed with exit code {code}; {folder / LOG} ends:\n    {tail}"
    result = result_of(folder)
    names = glue.find(result["task"]).score_names
    best = ", ".join(f"{name} {result['best'][name]:.4f}" for name in names)
    last = ", ".join(f"{name} {result['last'][name]:.4f}" for name in names)
    collapsed = f"; collapsed: {result['collapsed']}" if result["collapsed"] else ""
    return (
        f"{run.plan.name}: {best} in epoch {result['best']['epoch']}; {last} in the last; "
        f"{result['seconds']:.0f} s, {result['tokens_per_second']:,.0f} tokens/s{collapsed}"
    )
