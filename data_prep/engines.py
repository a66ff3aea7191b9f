"""Engines: run tasks in local processes or on a Ray cluster, and yield their outcomes in any order.

The work is `shard.prepare_shard`. Its files are written to the corpus folder.

Order: the interface, local processes, Ray.
"""

import ctypes
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from data_prep.common import children, console
from data_prep.inputs import input_state
from data_prep.manifest import ShardManifest, ShardTask
from data_prep.progress import Done, Progress

T = TypeVar("T")
Work = Callable[[ShardTask, Progress], ShardManifest]
Made = ShardManifest | ValueError | OSError
# Tasks, each with the shard that was made, or the reason why it failed.
Outcomes = Generator[tuple[ShardTask, Made], None, None]
Counters = ctypes.Array[ctypes.c_longlong]

_TICK_SECONDS = 0.5
_SECONDS_BETWEEN_POSITIONS = 1.0  # between two queries of the position in an input
_WIDTH = len(Done._fields)
_RETRIES = 2  # by Ray, of a task whose process or machine was lost
_counters: Counters  # of a worker process; set when it starts


class WorkerDied(RuntimeError):
    """A worker process ended without a result."""


Engine = Callable[[Work, Sequence[ShardTask], int, Progress], Outcomes]
"""Runs the work for each task, at most so many at once, and reports the total progress. Raises
ValueError where it is not available, and WorkerDied."""


def run_locally(
    work: Work, tasks: Sequence[ShardTask], workers: int, progress: Progress
) -> Outcomes:
    """Run tasks in processes of this machine (see `Engine`)."""
    # One row per task, written only by its worker. It needs no lock, which a killed worker would
    # leave locked.
    counters = RawArray("q", _WIDTH * len(tasks))
    # Not fork, because the caller may have threads, and hold locks that a fork would copy.
    context = children.spawn_context()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers, len(tasks)), context, initializer=_start_worker, initargs=(counters,)
    )
    try:
        futures = {pool.submit(_work, work, row, task): task for row, task in enumerate(tasks)}
        waiting = set(futures)
        while waiting:
            ended, waiting = wait(waiting, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED)
            progress(Done(*(sum(counters[column::_WIDTH]) for column in range(_WIDTH))))
            for future in ended:
                task, failure = futures[future], future.exception()
                if isinstance(failure, BrokenProcessPool):
                    raise _died(task) from failure
                refused = failure if isinstance(failure, ValueError | OSError) else None
                yield task, refused or future.result()
        pool.shutdown()
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # its shard is made again by a rerun
        # Waits for the pool's thread, which the interpreter's exit would otherwise race with.
        pool.shutdown(cancel_futures=True)
        raise


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
            result, count = _ray_result(ray, reference, task)
            done = Done(*map(sum, zip(done, count, strict=True)))
            progress(done)
            yield task, result


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
        f"a worker process died while {task.name} ({task.input}) was waiting or running; "
        "killed, or out of memory? Run the same command again, perhaps with fewer --workers: "
        "finished shards are kept"
    )


def _start_worker(counters: Counters) -> None:
    global _counters
    _counters = counters
    console.install()
    # Each worker uses one core; the threads of tokenizers would take those of the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    children.follow_parent()


def _work(work: Work, row: int, task: ShardTask) -> ShardManifest:
    import psutil

    queried = 0.0
    position_bytes = 0

    def progress(done: Done) -> None:
        nonlocal queried, position_bytes
        if time.monotonic() - queried >= _SECONDS_BETWEEN_POSITIONS:
            queried = time.monotonic()
            # That of the input file, which this process alone has open for reading.
            inputs = [f for f in psutil.Process().open_files() if f.fd > 2 and f.mode == "r"]
            position_bytes = sum(getattr(file, "position", 0) for file in inputs)
        _counters[first:last] = [*done._replace(input_bytes=position_bytes)]

    first, last = row * _WIDTH, (row + 1) * _WIDTH
    result = work(task, progress)
    _counters[last - 1] = input_state(task.input)[0]
    return result


def _work_and_count(work: Work, task: ShardTask, folder: Path) -> tuple[ShardManifest, Done]:
    os.chdir(folder)  # paths may be relative, and the manifest records them as given
    reports = deque([Done()], maxlen=1)
    result = work(task, reports.append)
    return result, reports[-1]._replace(input_bytes=input_state(task.input)[0])


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
        cores = min(workers, len(os.sched_getaffinity(0)))
        print(f"ray: no cluster found; using {cores} processes of this machine", file=sys.stderr)
        ray.init(address="local", num_cpus=cores, include_dashboard=False, **options)
    try:
        yield ray
    finally:
        ray.shutdown()


def _ray_result(ray: ModuleType, reference: object, task: ShardTask) -> tuple[Made, Done]:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError | OSError):
            return error.cause, Done()
        raise
    except ray.exceptions.RayError as error:
        raise _died(task) from error
