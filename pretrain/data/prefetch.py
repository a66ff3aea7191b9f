"""The next steps' batches, made by other processes while the model computes.

A batch is a pure function of (step, rank, ranks), so that who makes it, and when, cannot change
it. Processes, not threads: masking would take the interpreter's lock from the thread that launches
kernels. Results come in through the pool's own thread, so that a step waits for neither the work
nor the pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import connection, get_context, parent_process

from pretrain.loop import Batches, MicroBatch

_STEPS_A_WORKER = 2  # made ahead, so that one slow read is not felt

_batches: Batches
"""What this worker process makes batches of."""


@contextlib.contextmanager
def prefetched(batches: Batches, workers: int) -> Iterator[Batches]:
    """`batches`, those of the next steps made ahead by `workers` processes; none: as they are.

    Any step may be asked for, in any order; those after it are made ahead. An exception in a worker
    is raised where its batch is asked for, with the worker's traceback as its cause. The workers
    end with the context, and within moments of the death of this process.

    Args:
        batches: is pickled, once a worker.
        workers: processes; they take 5 s to begin where a corpus is read through megatron-core.
    """
    if not workers:
        yield batches
        return
    # Neither CUDA nor the threads of a rank survive a fork.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (batches,))
    try:
        yield _Prefetched(batches, pool, workers * _STEPS_A_WORKER)
    finally:
        pool.shutdown(cancel_futures=True)


class _Prefetched:
    """Batches with a window of steps under way."""

    def __init__(self, batches: Batches, pool: ProcessPoolExecutor, ahead: int) -> None:
        self._batches, self._pool, self._ahead = batches, pool, ahead
        self._pending: dict[tuple[int, int, int], Future[Sequence[MicroBatch]]] = {}
        self.seed, self.epoch = batches.seed, batches.epoch

    def micro_batches(self, step: int, rank: int, world_size: int) -> Sequence[MicroBatch]:
        window = [(later, rank, world_size) for later in range(step, step + self._ahead + 1)]
        self._pending = {
            key: self._pending.get(key) or self._pool.submit(_make, *key) for key in window
        }
        return self._pending[window[0]].result()


def follow_parent() -> None:
    """Make a pool's worker end when the process that started it does, and not before.

    Ctrl-C reaches every process of a terminal, and the parent decides what it means. A worker whose
    parent was killed would otherwise wait for work for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _begin(batches: Batches) -> None:
    global _batches
    _batches = batches
    follow_parent()


def _make(step: int, rank: int, world_size: int) -> Sequence[MicroBatch]:
    return _batches.micro_batches(step, rank, world_size)
