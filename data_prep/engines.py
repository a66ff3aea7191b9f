"""Engines: run tasks in local processes or on a Ray cluster, and yield their outcomes in any order.

The work is `shard.prepare_shard`. Its files are written to the corpus folder.

Order: the interface, local processes, Ray.
"""

import ctypes
import fcntl
import multiprocessing
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from data_prep.common import children, console
from data_prep.common.arguments import CommandFailed
from data_prep.manifest import ShardManifest, ShardTask
from data_prep.progress import Done, Progress

T = TypeVar("T")
Work = Callable[[ShardTask, Progress], ShardManifest]
Counters = ctypes.Array[ctypes.c_longlong]

_TICK_SECONDS = 0.5
_SECONDS_BETWEEN_POSITIONS = 1.0  # between two queries of the position in an input
_WIDTH = len(Done._fields)
_RETRIES = 2  # by Ray, of a task whose process or machine was lost
_counters: Counters  # of a worker process; set when it starts


class WorkerDied(CommandFailed):
    """A worker process ended without a result."""


Made = ShardManifest | ValueError | OSError | WorkerDied
# Tasks, each with the shard that was made, or the reason why it failed.
Outcomes = Generator[tuple[ShardTask, Made], None, None]
_Running = tuple[ShardTask, ProcessPoolExecutor]
Engine = Callable[[Work, Sequence[ShardTask], int, Progress], Outcomes]
"""Runs the work for each task, at most so many at once, and reports the total progress. Raises
ValueError where it is not available."""


def run_locally(
    work: Work, tasks: Sequence[ShardTask], workers: int, progress: Progress
) -> Outcomes:
    """Run tasks in processes of this machine (see `Engine`)."""
    # One row per task, written only by its worker. It needs no lock, which a killed worker would
    # leave locked.
    counters = RawArray("q", _WIDTH * len(tasks))
    others = set(multiprocessing.active_children())
    idle = [_worker(counters) for _ in range(min(workers, len(tasks)))]
    waiting, running = deque(enumerate(tasks)), dict[Future[Made], _Running]()
    try:
        while waiting or running:
            while waiting and idle:
                (row, task), pool = waiting.popleft(), idle.pop()
                running[pool.submit(_work, work, row, task)] = task, pool
            ended, _ = wait(running, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED)
            progress(Done(*(sum(counters[column::_WIDTH]) for column in range(_WIDTH))))
            for future in ended:
                task, pool = running.pop(future)
                is_dead = isinstance(future.exception(), BrokenProcessPool)
                idle.append(_worker(counters) if is_dead else pool)
                yield task, _died(task) if is_dead else future.result()
    finally:
        # Waits for the pools' threads, which the interpreter's exit would otherwise race with.
        for pool in idle:
            pool.shutdown()
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # an unfinished shard is made again by a rerun
        for _, pool in running.values():
            pool.shutdown()


def run_on_ray(
    work: Work, tasks: Sequence[ShardTask], workers: int, progress: Progress
) -> Outcomes:
    """Run tasks on a Ray cluster, or on a local Ray if no cluster is running (see `Engine`).

    All machines must see the inputs and the corpus folder under the same paths. Ray transfers the
    tasks, the code of this package, and the results. Progress is reported when a task ends.
    """
    # Machines need not have this package, and cannot use another version of it.
    with connected_ray(workers, [Path(__file__).parent]) as ray:
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_work_and_count)
        done = Done()
        for task, reference in ended_on_ray(
            ray, tasks, workers, lambda task: remote.remote(work, task, Path.cwd())
        ):
            try:
                outcome, count = ray.get(reference)
            except ray.exceptions.RayTaskError:  # of the work itself
                raise
            except ray.exceptions.RayError:
                outcome, count = _died(task), Done()
            done = Done(*map(sum, zip(done, count, strict=True)))
            progress(done)
            yield task, outcome


def ended_on_ray(
    ray: Any,  # noqa: ANN401 - a module
    tasks: Sequence[T],
    most: int,
    start: Callable[[T], Any],
) -> Iterator[tuple[T, Any]]:
    """Start tasks, at most so many at once, and yield each that ended with its reference."""
    waiting, running = deque(tasks), dict[Any, T]()
    while waiting or running:
        while waiting and len(running) < most:
            task = waiting.popleft()
            running[start(task)] = task
        for reference in ray.wait([*running])[0]:
            yield running.pop(reference), reference


ENGINES: dict[str, Engine] = {"local": run_locally, "ray": run_on_ray}


def _died(task: ShardTask) -> WorkerDied:
    return WorkerDied(
        f"a worker process died while {task.name} ({task.input}) was made; killed, or out of "
        "memory? Run the same command again, perhaps with fewer --workers: finished shards are kept"
    )


def _worker(counters: Counters) -> ProcessPoolExecutor:
    """Return a pool of one process, so that only its own task is lost if it dies."""
    # Not fork, because the caller may have threads, and hold locks that a fork would copy.
    context = children.spawn_context()
    return ProcessPoolExecutor(1, context, initializer=_start_worker, initargs=(counters,))


def _start_worker(counters: Counters) -> None:
    global _counters
    _counters = counters
    console.install()
    # Each worker uses one core; the threads of tokenizers would take those of the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _position_bytes() -> int:
    """Return the position in the input file, which this process alone has open for reading."""
    found = 0
    # psutil cannot tell positions where /proc does not, as in gVisor.
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the folder itself is closed
            is_file = number > 2 and stat.S_ISREG(os.fstat(number).st_mode)
            if is_file and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                found += os.lseek(number, 0, os.SEEK_CUR)
    return found


def _work(work: Work, row: int, task: ShardTask) -> Made:
    queried = 0.0
    position_bytes = 0

    def progress(done: Done) -> None:
        nonlocal queried, position_bytes
        if time.monotonic() - queried >= _SECONDS_BETWEEN_POSITIONS:
            queried = time.monotonic()
            position_bytes = _position_bytes()
        _counters[first:last] = [*done._replace(input_bytes=done.input_bytes or position_bytes)]

    first, last = row * _WIDTH, (row + 1) * _WIDTH
    return _outcome(work, task, progress)


def _outcome(work: Work, task: ShardTask, progress: Progress) -> Made:
    try:
        return work(task, progress)
    except (ValueError, OSError) as error:
        return error


def _work_and_count(work: Work, task: ShardTask, folder: Path) -> tuple[Made, Done]:
    os.chdir(folder)  # paths may be relative, and the manifest records them as given
    reports = deque([Done()], maxlen=1)
    return _outcome(work, task, reports.append), reports[-1]


def import_ray() -> ModuleType:
    """Import Ray, which is an extra.

    Raises:
        ValueError: It is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to its makers
    try:
        return import_module("ray")
    except ImportError as error:
        raise ValueError(
            "--engine ray: Ray is not installed; run `pip install 'zeroclap[ray]'`, or use "
            "--engine local"
        ) from error


@contextmanager
def connected_ray(workers: int, packages: Sequence[Path] = ()) -> Iterator[ModuleType]:
    """Connect to a running Ray cluster, or start a local Ray.

    Args:
        workers: at once, where no cluster is running; as many as there are cores at most.
        packages: folders of packages that are sent to the machines.

    Raises:
        ValueError: See `import_ray`; or no cluster answers at RAY_ADDRESS.
    """
    ray = import_ray()
    environment: dict[str, Any] = {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}}
    if packages:  # Ray refuses an empty list
        environment["py_modules"] = [*map(str, packages)]
    options: dict[str, Any] = {"logging_level": "error", "runtime_env": environment}
    try:
        ray.init(address="auto", **options)
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise ValueError(f"RAY_ADDRESS {address}: no Ray cluster answers there") from error
        cores = min(workers, children.usable_cores())
        print(f"ray: no cluster found; using {cores} processes of this machine", file=sys.stderr)
        ray.init(address="local", num_cpus=cores, include_dashboard=False, **options)
    try:
        yield ray
    finally:
        ray.shutdown()
