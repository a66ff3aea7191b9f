"""Where tasks are worked on: an engine runs them and yields what became of each, in any order.

The work is a function of this package that takes a `ShardTask` and a `Progress`, and returns
something small, as `shard.prepare_shard` does. What it makes lies in the corpus folder.

Order: the interface, processes of this machine, Ray.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from data_prep import console
from data_prep.inputs import input_state
from data_prep.progress import Done, Progress
from data_prep.shard import ShardTask

T = TypeVar("T")
Work = Callable[[ShardTask, Progress], T]
# What the work returned, or why it could not be done.
Outcome = tuple[ShardTask, T | ValueError | OSError]
Tick = Callable[[Done], None]

Counters = ctypes.Array[ctypes.c_longlong]

_TICK_SECONDS = 0.5
_SECONDS_BETWEEN_LOOKS = 1.0  # at how far an input has been read
_WIDTH = len(Done._fields)
_RETRIES = 2  # by Ray, of a task whose process or machine was lost
_counters: Counters  # of a worker; set as it starts


class WorkerDied(RuntimeError):
    """A worker process ended without an answer."""


class Engine(Protocol):
    """What all engines are."""

    def __call__(
        self, work: Work[T], tasks: Sequence[ShardTask], workers: int, tick: Tick
    ) -> Generator[Outcome[T], None, None]:
        """Do `work` for each task, at most `workers` at once; `tick` hears what is done so far.

        Raises:
            ValueError: The engine cannot be had here.
            WorkerDied: A process ended without an answer.
        """


def run_locally(
    work: Work[T], tasks: Sequence[ShardTask], workers: int, tick: Tick
) -> Generator[Outcome[T], None, None]:
    """Work in processes of this machine; see `Engine`."""
    # A row for each task, written by its worker alone, so that no lock can be left held by one that
    # is killed.
    counters = RawArray("q", _WIDTH * len(tasks))
    # Not fork: the caller may hold threads and locks that a fork would copy in the middle of
    # something.
    context = multiprocessing.get_context("spawn")
    strangers = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers, len(tasks)), context, initializer=_start_worker, initargs=(counters,)
    )
    try:
        futures = {pool.submit(_work, work, row, task): task for row, task in enumerate(tasks)}
        yield from _local_outcomes(futures, counters, tick)
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - strangers:
            process.kill()  # what it was making is made again
        raise


def run_on_ray(
    work: Work[T], tasks: Sequence[ShardTask], workers: int, tick: Tick
) -> Generator[Outcome[T], None, None]:
    """Work on the machines of a Ray cluster, or of a Ray started here where there is none.

    Every machine must see the inputs and the corpus folder under the same paths. Through Ray go the
    tasks, the code of this package and what the work returns; progress is heard as tasks end. See
    `Engine`.
    """
    with _ray(workers) as ray:
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_work_and_count)
        waiting = list(reversed(tasks))
        running: dict[Any, ShardTask] = {}
        done: list[Done] = []
        while waiting or running:
            while waiting and len(running) < workers:
                task = waiting.pop()
                running[remote.remote(work, task, Path.cwd())] = task
            for reference in ray.wait(list(running))[0]:
                task = running.pop(reference)
                result, count = _ray_result(ray, reference, task)
                done.append(count)
                tick(Done.total(done))
                yield task, result


ENGINES: dict[str, Engine] = {"local": run_locally, "ray": run_on_ray}


def _local_outcomes(
    futures: dict[Future[T], ShardTask], counters: Counters, tick: Tick
) -> Iterator[Outcome[T]]:
    waiting = set(futures)
    while waiting:
        ended, waiting = wait(waiting, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED)
        tick(Done(*(sum(counters[column::_WIDTH]) for column in range(_WIDTH))))
        for future in ended:
            result = _local_result(future, futures[future])
            yield futures[future], result


def _local_result(future: Future[T], task: ShardTask) -> T | ValueError | OSError:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise _died(task) from error
    except (ValueError, OSError) as error:
        return error


def _died(task: ShardTask) -> WorkerDied:
    return WorkerDied(
        f"a worker process died while {task.name} ({task.input}) was waiting or in work; "
        "killed, or out of memory? Run the same command again, perhaps with fewer --workers: "
        "finished shards are kept"
    )


def _start_worker(counters: Counters) -> None:
    global _counters
    _counters = counters
    console.install()
    # One process is one core: the tokenizer's own threads would take those of the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """End this worker when its parent is gone, even by kill -9: nobody would read its answer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(work: Work[T], row: int, task: ShardTask) -> T:
    looked = 0.0
    position_bytes = 0

    def progress(documents: int, text_bytes: int, tokens: int = 0) -> None:
        nonlocal looked, position_bytes
        if time.monotonic() - looked >= _SECONDS_BETWEEN_LOOKS:
            looked, position_bytes = time.monotonic(), _position_bytes()
        _counters[first:last] = [documents, text_bytes, tokens, position_bytes]

    first, last = row * _WIDTH, (row + 1) * _WIDTH
    result = work(task, progress)
    _counters[last - 1] = input_state(task.input)[0]
    return result


def _position_bytes() -> int:
    """How far this process has read in the file that it has open; 0 where the system is silent."""
    import psutil

    files = psutil.Process().open_files()
    return sum(getattr(file, "position", 0) for file in files if file.fd > 2 and file.mode == "r")


def _work_and_count(work: Work[T], task: ShardTask, folder: Path) -> tuple[T, Done]:
    os.chdir(folder)  # paths may be relative, and are recorded as they are
    done = Done()

    def progress(documents: int, text_bytes: int, tokens: int = 0) -> None:
        nonlocal done
        done = Done(documents, text_bytes, tokens)

    return work(task, progress), done._replace(input_bytes=input_state(task.input)[0])


@contextmanager
def _ray(workers: int) -> Iterator[ModuleType]:
    """Ray, connected: to the cluster that is running, else to `workers` processes here."""
    # Ray would tell its makers of every run.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise ValueError(
            "--engine ray: Ray is not installed; accepted: --engine local, or after "
            "`pip install 'zeroclap[ray]'`"
        ) from error
    options: dict[str, Any] = {
        "logging_level": "error",
        # The machines need not have the package, and cannot have another version of it.
        "runtime_env": {
            "py_modules": [str(Path(__file__).parent)],
            "env_vars": {"TOKENIZERS_PARALLELISM": "false"},
        },
    }
    try:
        ray.init(address="auto", **options)
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise ValueError(f"RAY_ADDRESS {address}: no Ray cluster answers there") from error
        print(f"ray: no cluster is running; {workers} processes of this machine", file=sys.stderr)
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **options)
    try:
        yield ray
    finally:
        ray.shutdown()


def _ray_result(ray: ModuleType, reference: object, task: ShardTask) -> tuple[Any, Done]:
    try:
        result: tuple[Any, Done] = ray.get(reference)
        return result
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError | OSError):
            return error.cause, Done()
        raise
    except ray.exceptions.RayError as error:
        raise _died(task) from error
