"""Functions of a benchmark that several ranks run, in forked processes of this machine."""

import contextlib
import io
import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def prepare() -> None:
    """Choose the CPU, one thread a rank, and import what is heavy: once, before the forks."""
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    warnings.simplefilter("ignore")
    import deepspeed.ops.adam  # noqa: F401
    import torch._inductor.compile_fx
    import torch.utils.cpp_extension
    import torch.utils.tensorboard.writer  # noqa: F401


def run(ranks: int, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """What a function returns on rank 0 of so many; what it prints is lost."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("fork")) as pool:
        jobs = [
            pool.submit(_as_rank, rank, ranks, port, function, arguments) for rank in range(ranks)
        ]
        return [job.result() for job in jobs][0]


def _as_rank(
    rank: int, ranks: int, port: int, function: Callable[..., Any], arguments: tuple[object, ...]
) -> object:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (names | address).items()})
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*arguments)
