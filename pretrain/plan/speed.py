"""Measure the training speed of a recipe on this machine, for `bench` and `plan --kind here`.

Every rank trains the recipe's model on random tokens, through the engine and the loop of a run.
"""

import dataclasses
import multiprocessing
import os
import statistics
import sys
import timeit
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import torch
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from data_prep.common.children import usable_memory
from data_prep.tokenizer import Tokenizer
from pretrain.checks import devices, needs
from pretrain.checks.recipe import check_device
from pretrain.config.deepspeed import compiles
from pretrain.config.run import RunConfig
from pretrain.convert.initial_weights import initial_model
from pretrain.data.sources import SOURCES
from pretrain.engine.distributed import Process, leave, most_bytes
from pretrain.engine.engine import Engine, deepspeed_json, start
from pretrain.loop.loop import run as run_loop
from pretrain.loop.protocols import GO_ON, MicroBatch, StepRecord
from pretrain.model.backends import choose_backend
from pretrain.objectives.base import Block, PretrainingObjective, Vocabulary
from pretrain.objectives.tokens import FIRST_WORD_ID
from pretrain.plan.plan import CPU, Measured, vocabulary_size
from pretrain.processes.launching import describe_exit, free_port

_WARM_UP = 2
_LEAST_UPDATES = 3
_ENOUGH = 1
"""Exit code of the loop that ends the measurement."""
_DOCUMENTS = 4
"""Documents of a row, if the packing puts several into one."""


@dataclasses.dataclass(frozen=True)
class Speed(Measured):
    """The results of `bench`."""

    torch: str
    """Its version."""
    size: str
    """The recipe's `model.size`."""
    variant: str
    """The recipe's `model.variant`."""
    backend: str
    """Of attention."""
    length: int
    """Tokens per row."""
    micro_batch_size: int
    global_batch_size: int
    seconds: float
    """Median time of an update."""
    tokens_per_second: float
    """Of all devices."""
    computed_flops: float
    """Like `flops`, for the pairs of positions that attention computes (`needs.computed_pairs`)."""
    matmul_flops: float
    """FLOP/s of a large matrix product on one device, measured in the same process."""
    peak_bytes: int
    """Peak memory in training: of a GPU, or of a process on the CPU."""


def table(speed: Speed) -> str:
    """Format the results as text."""
    kind = devices.kind_of(speed.device)
    peaks = [(devices.DEVICES[kind].flops, f"MFU (of the data sheet of {kind})")] if kind else []
    peaks.append((speed.matmul_flops, "of a matrix product's FLOP/s (measured)"))
    lines = [
        f"{speed.size} {speed.variant}, {speed.micro_batch_size} x {speed.length}, "
        f"{speed.world_size} x {speed.device}, torch {speed.torch}, attention {speed.backend}",
        f"{speed.tokens_per_second:,.0f} tokens/s; {1e3 * speed.seconds:,.1f} ms an update of "
        f"{speed.global_batch_size} x {speed.length} tokens",
        *(
            f"{speed.flops / peak:.1%} {name}; {speed.computed_flops / peak:.1%} by the pairs of "
            "positions that attention computes"
            for peak, name in peaks
        ),
        f"{speed.peak_bytes / 1e9:.2f} GB peak memory",
    ]
    return "\n".join(lines) + "\n"


def random_batch(
    config: RunConfig, objective: PretrainingObjective, vocab_size: int, index: int
) -> MicroBatch:
    """Make a micro-batch of full rows of random tokens, as the recipe cuts them.

    Args:
        config: the recipe.
        objective: the recipe's.
        vocab_size: ids of the vocabulary; the last one is `<mask>`.
        index: of the micro-batch in the global batch.
    """
    data, rows, seed = config.data, config.batch.micro_batch_size, config.training.seed
    draw, length = np.random.default_rng([seed, index]), data.sequence_length

    def block() -> Block:
        packing, ids = SOURCES[data.packing], draw.integers(FIRST_WORD_ID, vocab_size - 1, length)
        if packing.pairs:
            sentences = np.array([length // 2, length - length // 2])
            return Block(ids, sentences=sentences, sample_other_document=lambda place: block())
        if config.objective.causal:
            ids[0] = Tokenizer.bos_id
        if not packing.documents_apart:
            return Block(ids)
        cuts = np.sort(draw.integers(1, length, _DOCUMENTS - 1))
        return Block(ids, 1 + np.searchsorted(cuts, np.arange(length), "right"))

    keys = [(seed, 0, rows * index + row) for row in range(rows)]
    arrays = objective.collate([block() for _ in keys], keys, length)
    return MicroBatch(index, arrays, rows * length, objective.targets(arrays), seed)


def measure_launch(recipe: RunConfig, ranks: int, seconds: float, most: int) -> Speed:
    """Call `measure` in as many processes of this machine, forked from this one.

    Raises:
        ValueError: that of `measure`, or a process was killed.
    """
    found: SimpleQueue[Speed] = multiprocessing.SimpleQueue()
    arguments = (ranks, free_port(), found, (recipe, seconds, most))
    try:
        # Called before anything has used a GPU, or torch's threads.
        start_processes(_be_rank, arguments, ranks, start_method="fork")  # type: ignore[no-untyped-call]
    except ProcessExitedException as error:
        raise ValueError(
            f"a rank {describe_exit(error.exit_code)} while it was measured; if memory ran out, "
            "set a smaller batch.micro_batch_size or model.size"
        ) from error
    except ProcessRaisedException as error:
        _, is_refused, reason = str(error).rstrip().rpartition("\nValueError: ")
        if is_refused:
            raise ValueError(reason) from error
        raise
    return found.get()


def _be_rank(
    rank: int, ranks: int, port: int, found: SimpleQueue[Speed], asked: tuple[RunConfig, float, int]
) -> None:
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if speed := measure(*asked):
        found.put(speed)


def measure(recipe: RunConfig, seconds: float, most: int = 0) -> Speed | None:
    """Train a recipe's model for about `seconds` after two updates to warm up.

    Called by every rank of a launch; without a launcher there is one.

    Args:
        recipe: whose first phase is measured; its corpus is not read.
        seconds: of training; at least three updates are measured.
        most: micro-batches of a rank in an update, if the recipe's are more; 0: the recipe's.

    Returns:
        The figures of rank 0, where it is called; None on other ranks.

    Raises:
        ValueError: the recipe does not fit the number of ranks or the device, or its micro-batch
            the memory.
    """
    config, vocab_size = recipe.segments.at(0).config, vocabulary_size(recipe)
    batch, process = config.batch, start()
    if 0 < most < batch.accumulation_steps(process.world_size):
        blocks = batch.micro_batch_size * process.world_size * most
        batch = dataclasses.replace(batch, global_batch_size=blocks)
        config = dataclasses.replace(config, batch=batch)
    try:
        speed = _measure(config, vocab_size, seconds, process)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"batch.micro_batch_size {batch.micro_batch_size}: does not fit the device's "
            f"memory ({str(error).splitlines()[0]}); set a smaller one"
        ) from error
    leave()
    return speed


def _measure(config: RunConfig, vocab_size: int, seconds: float, process: Process) -> Speed | None:
    training, device = config.training, process.device
    check_device(config, process.world_size, device.type)
    architecture = config.architecture(vocab_size)
    backend = choose_backend(architecture, training.attention_backend, device.type == "cuda")
    folder = Path(next((source.path for source in config.segments.sources), ""))
    vocabulary = Vocabulary(vocab_size, architecture.vocab_size, folder)
    world_size = process.world_size
    settings = deepspeed_json(*config.deepspeed_arguments(world_size))
    compiled = compiles(training.compile, settings, device.type == "cuda")
    objective = config.objective.build(vocabulary)
    count = world_size * config.batch.accumulation_steps(world_size)
    mine = [
        random_batch(config, objective, vocab_size, index)
        for index in range(process.rank, count, world_size)
    ]
    model = initial_model(config, architecture, backend, compiled, read=False)
    engine = Engine(model, config.optimizer, settings, process)
    _reset_peak(device)
    durations = _timed_updates(engine, mine, objective, seconds)
    if process.rank:
        return None
    peak_bytes = most_bytes(device)
    del engine, model
    length, rows = config.data.sequence_length, config.batch.global_batch_size
    speed = rows * length / statistics.median(durations)
    share = config.objective.target_share
    ids = mine[0].arrays["document_ids"]
    pairs = needs.computed_pairs(architecture, backend, ids) / ids.size
    flops, computed = (
        speed / world_size * needs.flops_per_token(architecture, length, share, each)
        for each in (None, pairs)
    )
    name, memory_bytes = CPU, usable_memory()[0]
    if device.type == "cuda":
        name, memory_bytes = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    return Speed(
        device=name,
        memory_bytes=memory_bytes,
        torch=torch.__version__,
        world_size=world_size,
        size=config.model.size,
        variant=config.model.variant,
        backend=backend,
        length=length,
        micro_batch_size=config.batch.micro_batch_size,
        global_batch_size=rows,
        seconds=rows * length / speed,
        tokens_per_second=speed,
        flops=flops,
        computed_flops=computed,
        matmul_flops=_matmul_peak(device),
        peak_bytes=peak_bytes,
    )


def _timed_updates(
    engine: Engine, mine: Sequence[MicroBatch], objective: PretrainingObjective, seconds: float
) -> list[float]:
    """Train for about `seconds` after the warm-up; return how long each update took.

    Every update has the same global batch, of which this rank reads `mine`.
    """
    durations: list[float] = []

    def observe(record: StepRecord) -> int:
        if record.step >= _WARM_UP:
            durations.append(record.seconds)
        enough = len(durations) >= _LEAST_UPDATES and sum(durations) >= seconds
        return _ENOUGH if enough else GO_ON

    run_loop(
        engine,
        lambda *_: mine,
        objective,
        learning_rate=lambda step: 1e-4,
        steps=range(sys.maxsize),
        observers=[observe],
    )
    return durations


def _matmul_peak(device: torch.device) -> float:
    """Return the FLOP/s of a large matrix product, in bf16 on a GPU and fp32 on a CPU."""
    on_gpu = device.type == "cuda"
    side, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)

    def multiply() -> None:
        torch.matmul(a, b)
        if on_gpu:
            torch.cuda.synchronize()

    return 2 * side**3 / min(timeit.repeat(multiply, number=1, repeat=20))


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # gVisor has none
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
