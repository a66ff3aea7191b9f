"""Where shards are made: an engine runs tasks and yields what became of each, in any order."""

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import RawArray

from data_prep.manifest import ShardManifest
from data_prep.shard import ShardTask, prepare_shard

# The manifest of a shard, or why it could not be made.
Outcome = tuple[ShardTask, ShardManifest | ValueError | OSError]
Tick = Callable[[int, int], None]  # documents and text bytes so far
Engine = Callable[[Sequence[ShardTask], int, Tick], Generator[Outcome, None, None]]

Counters = ctypes.Array[ctypes.c_longlong]

_TICK_SECONDS = 0.5
_counters: Counters  # of a worker; set as it starts


class WorkerDied(RuntimeError):
    """A worker process ended without an answer."""


def run_locally(
    tasks: Sequence[ShardTask], workers: int, tick: Tick
) -> Generator[Outcome, None, None]:
    """Make shards in `workers` processes of this machine.

    Raises:
        WorkerDied: A process was killed, as by the system when memory runs out.
    """
    # A row for each task, written by its worker alone, so that no lock can be left held by one that
    # is killed.
    counters = RawArray("q", 2 * len(tasks))
    # Not fork: the caller may hold threads and locks that a fork would copy in the middle of
    # something.
    context = multiprocessing.get_context("spawn")
    strangers = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers, len(tasks)), context, initializer=_start_worker, initargs=(counters,)
    )
    try:
        futures = {pool.submit(_work, row, task): task for row, task in enumerate(tasks)}
        yield from _outcomes(futures, counters, tick)
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - strangers:
            process.kill()  # what it was making is made again
        raise


ENGINES: dict[str, Engine] = {"local": run_locally}


def _outcomes(
    futures: dict[Future[ShardManifest], ShardTask], counters: Counters, tick: Tick
) -> Iterator[Outcome]:
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED)
        tick(sum(counters[0::2]), sum(counters[1::2]))
        for future in done:
            yield futures[future], _result(future, futures[future])


def _result(future: Future[ShardManifest], task: ShardTask) -> ShardManifest | ValueError | OSError:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise WorkerDied(
            f"a worker process died while {task.name} ({task.input}) was waiting or in work; "
            "killed, or out of memory? Run the same command again, perhaps with fewer --workers: "
            "finished shards are kept"
        ) from error
    except (ValueError, OSError) as error:
        return error


def _start_worker(counters: Counters) -> None:
    global _counters
    _counters = counters
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


def _work(row: int, task: ShardTask) -> ShardManifest:
    def progress(documents: int, text_bytes: int) -> None:
        _counters[2 * row] = documents
        _counters[2 * row + 1] = text_bytes

    return prepare_shard(task, progress)
