"""The training speed of a recipe on this machine's devices, for `bench`.

Every rank trains the recipe's model on random tokens, through the engine and the loop of a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_prep.tokenizer import Tokenizer
from pretrain.checks import devices, needs
from pretrain.config.deepspeed import compiles
from pretrain.config.run import RunConfig
from pretrain.config.sections import OptimizerConfig
from pretrain.data.sources import SOURCES
from pretrain.engine import optimizers
from pretrain.engine.distributed import Process, choose_device
from pretrain.engine.engine import Engine, deepspeed_json, start
from pretrain.loop.loop import Rank0Callbacks
from pretrain.loop.loop import run as run_loop
from pretrain.loop.protocols import GO_ON, MicroBatch, StepRecord
from pretrain.model import attention
from pretrain.model.backends import choose_backend
from pretrain.model.config import VOCABULARY_MULTIPLE
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import EncoderLayer
from pretrain.objectives.base import Block, PretrainingObjective, Vocabulary
from pretrain.objectives.tokens import FIRST_WORD_ID, summed_loss
from pretrain.plan import roofline
from pretrain.plan.measured_speed import Speed
from pretrain.plan.plan import vocabulary_size

_WARM_UP = 2
_LEAST_UPDATES = 3
_ENOUGH = 1
"""The verdict that ends the measurement."""
_DOCUMENTS = 4
"""Of a row, where the packing puts several into one."""


@dataclasses.dataclass(frozen=True)
class RandomBatches:
    """The same global batch in every step: full rows of random tokens, as the recipe cuts them."""

    config: RunConfig
    objective: PretrainingObjective
    vocab_size: int
    """Ids of the vocabulary; the last one is `<mask>`."""
    count: int
    """Micro-batches of a rank in an update."""
    made: list[MicroBatch] = dataclasses.field(default_factory=list)

    def seed(self, step: int) -> int:
        """The seed of the dropout."""
        return self.config.training.seed

    def epoch(self, step: int) -> float:
        """None of a corpus is read."""
        return 0.0

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[MicroBatch]:
        """What one rank reads in a step."""
        if not self.made:
            indices = range(rank, self.count * world_size, world_size)
            self.made.extend(self.micro_batch(index) for index in indices)
        return self.made

    def micro_batch(self, index: int) -> MicroBatch:
        """Make one of the global batch's micro-batches."""
        length, rows = self.config.data.sequence_length, self.config.batch.micro_batch_size
        draw = np.random.default_rng([self.seed(0), index])
        keys = [(self.seed(0), 0, rows * index + row) for row in range(rows)]
        blocks = [self._block(draw) for _ in keys]
        arrays = self.objective.collate(blocks, keys, length)
        return MicroBatch(index, arrays, rows * length, self.objective.targets(arrays))

    def _block(self, draw: np.random.Generator) -> Block:
        length, packing = self.config.data.sequence_length, SOURCES[self.config.data.packing]
        ids = draw.integers(FIRST_WORD_ID, self.vocab_size - 1, length)
        if packing.pairs:
            half = length // 2
            sentences = np.array([half, length - half])
            return Block(ids, sentences=sentences, elsewhere=lambda place: self._block(draw))
        if self.config.objective.causal:
            ids[0] = Tokenizer.bos_id
        if not packing.documents_apart:
            return Block(ids)
        cuts = np.sort(draw.integers(1, length, _DOCUMENTS - 1))
        return Block(ids, 1 + np.searchsorted(cuts, np.arange(length), "right"))


def measure(recipe: RunConfig, seconds: float) -> Speed | None:
    """Train a recipe's model for about `seconds` after two updates to warm up.

    Called by every rank of a launch; without a launcher there is one.

    Args:
        recipe: whose first phase is measured; its corpus is not read.
        seconds: of training; at least three updates are measured.

    Returns:
        The figures of rank 0, where it is called; None on other ranks.

    Raises:
        ValueError: the recipe does not fit the number of ranks, or its micro-batch the memory.
    """
    config, vocab_size = recipe.phase(0).config, vocabulary_size(recipe)
    process = start()
    try:
        speed = _measure(config, vocab_size, seconds, process)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"batch.micro_batch_size {config.batch.micro_batch_size}: does not fit the device's "
            f"memory ({str(error).splitlines()[0]}); set a smaller one"
        ) from error
    torch.distributed.destroy_process_group()  # NCCL warns of groups that are left
    return speed


def _measure(config: RunConfig, vocab_size: int, seconds: float, process: Process) -> Speed | None:
    training, device, began = config.training, process.device, time.perf_counter()
    architecture = config.architecture(vocab_size)
    backend = choose_backend(architecture, training.attention_backend, device.type == "cuda")
    folder = Path(next((stream.path for stream in config.streams), ""))
    vocabulary = Vocabulary(vocab_size, architecture.vocab_size, folder)
    world_size, clipping = process.world_size, config.optimizer.gradient_clipping
    settings = deepspeed_json(training.deepspeed, config.batch, clipping, world_size)
    compiled = compiles(training.compile, settings, device.type == "cuda")
    objective = config.objective.build(vocabulary, compiled=compiled)
    count = config.batch.accumulation_steps(world_size)
    batches = RandomBatches(config, objective, vocab_size, count)

    def model() -> LanguageModel:
        torch.manual_seed(training.seed)
        return LanguageModel(architecture, VOCABULARY_MULTIPLE, backend)

    engine = Engine(
        model(),
        config.optimizer,
        settings,
        process,
        activation_checkpointing=training.activation_checkpointing,
        compiled=compiled,
    )
    _reset_peak(device)
    times: list[float] = []
    ready: list[float] = []

    def observe(record: StepRecord) -> None:
        if record.step + 1 == _WARM_UP:
            ready.append(time.perf_counter())
        if record.step >= _WARM_UP:
            times.append(record.seconds)

    def stop(steps: int) -> int:
        enough = len(times) >= _LEAST_UPDATES and time.perf_counter() >= ready[0] + seconds
        return _ENOUGH if enough else GO_ON

    run_loop(
        engine,
        batches,
        objective,
        learning_rate=lambda step: 1e-4,
        steps=range(sys.maxsize),
        rank_0=Rank0Callbacks([observe], stop=stop),
    )
    if process.rank:
        return None
    peak_bytes = _peak_bytes(device)
    del engine
    length, rows = config.data.sequence_length, config.batch.global_batch_size
    update = statistics.median(times)
    speed = rows * length / update
    flops = needs.flops_per_token(architecture, length, config.objective.target_share)
    kind = devices.kind_of(device_name(device))
    expected = kind and roofline.expect(config, architecture, world_size, kind, in_bench=True)
    return Speed(
        device=device_name(device),
        torch=torch.__version__,
        world_size=world_size,
        size=config.model.size,
        variant=config.model.variant,
        backend=backend,
        length=length,
        micro_batch_size=config.batch.micro_batch_size,
        global_batch_size=rows,
        seconds=update,
        tokens_per_second=speed,
        flops=flops * speed / world_size,
        matmul_flops=matmul_peak(str(device)),
        peak_bytes=peak_bytes,
        start_seconds=ready[0] - began,
        expected_seconds=expected.seconds if expected else None,
        parts=_parts(model().to(device), batches, config.optimizer, device),
    )


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; "CPU" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def matmul_peak(name: str | None = None) -> float:
    """Return the FLOP/s of a large matrix product, in bf16 on a GPU and fp32 on a CPU.

    Args:
        name: of the device, see `choose_device`.
    """
    device = choose_device(name)
    on_gpu = device.type == "cuda"
    side, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    return 2 * side**3 / min(_seconds(lambda: a @ b, device) for _ in range(20))


def _parts(
    model: LanguageModel, batches: RandomBatches, optimizer: OptimizerConfig, device: torch.device
) -> dict[str, float]:
    """Return the seconds of each part of a rank's update, measured alone and not compiled.

    Without layers where the model has latents: its layers read different numbers of tokens.
    """
    tensors = batches.micro_batch(0).to(device)
    config = model.config

    def update_seconds(part: Callable[[], Tensor]) -> float:
        """Seconds of a part, forward and backward, in all micro-batches."""

        def once() -> None:
            with _autocast(device):
                result = part()
            result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]

        return batches.count * _median_seconds(once, device)

    random = functools.partial(
        torch.randn,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        requires_grad=True,
    )
    found = {} if config.latents else _layers(model, tensors, random, update_seconds)
    features = random(len(tensors["labels"]), config.hidden_size)
    table = model.encoder.embeddings.tokens.weight
    found["head"] = update_seconds(
        lambda: summed_loss(model.head(features, table), tensors["labels"])
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = optimizers.build(model, optimizer).step
    found["optimizer"] = _median_seconds(step, device)
    found["data"] = batches.count * _median_seconds(lambda: batches.micro_batch(0), device)
    return found


def _layers(
    model: LanguageModel,
    tensors: Mapping[str, Tensor],
    random: Callable[..., Tensor],
    update_seconds: Callable[[Callable[[], Tensor]], float],
) -> dict[str, float]:
    """Return the seconds of attention and of the matrix products of all layers."""
    config, layer = model.config, model.encoder.layers[0]
    assert isinstance(layer, EncoderLayer)
    with torch.no_grad():
        x, context = model.encoder.embed(
            tensors["input_ids"], tensors.get("document_ids"), tensors.get("segment_ids")
        )
    heads, hidden = config.num_heads, config.hidden_size
    read, qkv = random(*x.shape), random(*x.shape[:2], 3, heads, hidden // heads)
    inner = random(*x.shape[:2], config.intermediate_size)

    def matrices() -> Tensor:
        pairs = [
            (layer.attention.query_key_value, read),
            (layer.attention.output, read),
            (layer.expand, read),
            *([(layer.gate, read)] if layer.gate is not None else []),
            (layer.contract, inner),
        ]
        return torch.cat([matrix(what).flatten() for matrix, what in pairs])

    attend = functools.partial(attention.attend, qkv, dropout=config.attention_dropout)
    contexts = context.of_layers(config.windows)
    return {
        "attention": sum(update_seconds(functools.partial(attend, each)) for each in contexts),
        "matrices": config.num_layers * update_seconds(matrices),
    }


def _autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    on_gpu = device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()


def _median_seconds(action: Callable[[], object], device: torch.device) -> float:
    action()
    return statistics.median(_seconds(action, device) for _ in range(3))


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # Not getrusage: its peak starts at the memory of the parent process.
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
