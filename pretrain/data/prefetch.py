"""Prefetching: worker processes make the batches of the next steps while the model computes.

A batch is a pure function of (step, rank, world_size), so the worker that makes it cannot change
it. Workers are processes because threads would hold the interpreter's lock while the main thread
launches kernels. Results arrive through the pool's own thread, so that a step waits neither for the
work nor for the pipe.
"""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor

from data_prep.common import children
from pretrain.loop.protocols import Batches, MicroBatch

_STEPS_PER_WORKER = 2  # hides one slow read

_batches: Batches
"""Global of a worker process: the batches that it makes."""


@contextlib.contextmanager
def prefetched(batches: Batches, workers: int) -> Iterator[Batches]:
    """Yield `batches` with the next steps prefetched by worker processes.

    Steps may be requested in any order; those after the requested one are made ahead. An exception
    in a worker is raised where its batch is requested, with the worker's traceback as its cause.
    The workers end with the context, and soon after this process dies.

    Args:
        batches: pickled once per worker.
        workers: number of processes; 0 yields `batches` unchanged.
    """
    if not workers:
        yield batches
        return
    # Spawned: neither CUDA nor a rank's threads survive a fork.
    pool = ProcessPoolExecutor(workers, children.spawn_context(), _begin, (batches,))
    ahead = workers * _STEPS_PER_WORKER
    pending: dict[tuple[int, int, int], Future[Sequence[MicroBatch]]] = {}

    def read(step: int, rank: int, world_size: int) -> Sequence[MicroBatch]:
        nonlocal pending
        window = [(later, rank, world_size) for later in range(step, step + ahead + 1)]
        pending = {key: pending.get(key) or pool.submit(_make, *key) for key in window}
        return pending[window[0]].result()

    try:
        yield read
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(batches: Batches) -> None:
    global _batches
    _batches = batches


def _make(step: int, rank: int, world_size: int) -> Sequence[MicroBatch]:
    return _batches(step, rank, world_size)
