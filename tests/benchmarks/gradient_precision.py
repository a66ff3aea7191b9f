"""Benchmark of gradient accumulation in bf16: gradients of ds_configs/ compared with fp32.

    python -m tests.benchmarks.gradient_precision

Does one update over many micro-batches of random ids, and reads its gradient from Adam's first
moment. Further updates measure time and memory. Takes 2 minutes with the defaults.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pretrain.config.run import BatchConfig, OptimizerConfig
from pretrain.loop import MicroBatch
from pretrain.objectives.base import Block
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.objectives.tokens import FIRST_WORD_ID

REFERENCE = "zero1_fp32"
VOCABULARY = 1000
UPDATES = 3


class Measured(NamedTuple):
    """Figures of one settings file."""

    gradient: torch.Tensor
    seconds: float
    """CPU time of rank 0 per update, which other work on the machine does not lengthen."""
    megabytes: float
    """Peak memory of rank 0, weights included."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["zero1_bf16", "zero2_bf16", "zero3_bf16"])
    parser.add_argument("--size", default="small", help="model size")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per block")
    parser.add_argument("--blocks", type=int, default=4, help="blocks per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=64, help="micro-batches of all ranks")
    parser.add_argument("--world-size", type=int, default=1)
    options = parser.parse_args()
    exact = measured(REFERENCE, options)
    print(f"{options.size}, {options.micro_batches} micro-batches on {options.world_size} ranks")
    for name in options.names:
        found = measured(name, options)
        error = float((found.gradient - exact.gradient).norm() / exact.gradient.norm())
        print(
            f"{name:20} {100 * error:6.2f} % from fp32 {found.seconds / exact.seconds:8.2f} x its "
            f"CPU time {found.megabytes - exact.megabytes:+9.0f} MB"
        )


def measured(name: str, options: argparse.Namespace) -> Measured:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(options.world_size, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(train, rank, port, name, options) for rank in range(options.world_size)]
        return [job.result() for job in jobs][0]


def train(rank: int, port: int, name: str, options: argparse.Namespace) -> Measured:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
        CUDA_VISIBLE_DEVICES="",
    )
    warnings.simplefilter("ignore")
    from deepspeed.utils import safe_get_full_optimizer_state

    from pretrain.engine import engine
    from pretrain.model import presets
    from pretrain.model.language_model import LanguageModel

    process = engine.start()
    torch.manual_seed(1)
    overrides = {"dropout": 0.0, "attention_dropout": 0.0, "max_positions": options.tokens}
    model = LanguageModel(presets.build(options.size, "baseline", VOCABULARY, overrides))
    size = options.micro_batches * options.blocks
    optimizer = OptimizerConfig(weight_decay=0.0)
    settings = engine.deepspeed_json(
        name, BatchConfig(size, options.blocks), 0.0, process.world_size
    )
    built = engine.Engine(model, optimizer, settings, process)
    objective = MaskedLM(MaskedLMConfig(), VOCABULARY - 1, VOCABULARY - 1)
    mine = [
        batch(objective, index, options)
        for index in range(rank, size // options.blocks, process.world_size)
    ]
    seconds = []
    for step in range(UPDATES):
        started = time.process_time()
        built.step(mine, objective, 1e-4, 1, step)
        seconds.append(time.process_time() - started)
        if step == 0:
            moments = [
                safe_get_full_optimizer_state(parameter, "exp_avg").flatten().double()
                for parameter in built._deepspeed.module.parameters()
            ]
            gradient = torch.cat(moments).float() / (1 - optimizer.beta1)
    return Measured(gradient, statistics.median(seconds[1:]), peak_megabytes())


def batch(objective: MaskedLM, index: int, options: argparse.Namespace) -> MicroBatch:
    draw = np.random.default_rng(index)
    ids = [
        Block(draw.integers(FIRST_WORD_ID, VOCABULARY - 1, options.tokens))
        for _ in range(options.blocks)
    ]
    keys = [(1, 0, index * options.blocks + number) for number in range(options.blocks)]
    arrays = objective.collate(ids, keys, options.tokens)
    tokens = options.blocks * options.tokens
    return MicroBatch(index, arrays, tokens, objective.targets(arrays))


def peak_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) / 1000


if __name__ == "__main__":
    main()
