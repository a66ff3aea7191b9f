"""What a recipe will cost, before anything is spent: `python -m pretrain plan`. Imports no torch.

P parameters as trained, R ranks, w bytes of a weight (2 in bf16 and fp16, 4 in fp32); the other
letters are those of pretrain/model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from data_prep.manifest import load_manifest
from pretrain.config.run import RunConfig
from pretrain.engine import settings as deepspeed_settings
from pretrain.model import presets
from pretrain.model.config import ModelConfig
from pretrain.spikes.policy import max_checkpoints_kept


@dataclasses.dataclass(frozen=True)
class Device:
    """What its maker says of a GPU."""

    flops: float
    """Dense bf16 multiplications and additions a second, at most."""
    memory: float
    """Bytes."""


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "a100": Device(312e12, 80e9),
        "h100": Device(989e12, 80e9),
        "h200": Device(989e12, 141e9),
    }
)
"""NVIDIA's data sheets of the SXM cards; of the A100 there is one with half the memory, too."""


STATED = "stated, not measured"
"""Where a share of the peak comes from that somebody expects."""

DEEPSPEED_BUCKET = 500_000_000
"""Numbers, where the settings do not say (DeepSpeed 0.19)."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one rank, but for what the allocator and the kernels need besides."""

    weights: int
    gradients: int
    optimizer: int
    """On the host where it is offloaded."""
    bucket: int
    """Where DeepSpeed collects gradients before it sends them."""
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run takes; sizes in bytes."""

    parameters: int
    """As exported; the table's rows of no token not counted."""
    trained_parameters: int
    tokens: int
    """Places of all blocks that are read; padding counts, for it is computed."""
    flops_per_token: float
    flops: float
    world_size: int
    stage: int
    """Of ZeRO, as the recipe says."""
    memory: dict[int, Memory]
    """By ZeRO stage."""
    checkpoint: int
    checkpoints: int
    """All that may be kept at once, those for rollbacks included, and one that is being written."""
    exported: int
    kind: str
    device_memory: float
    utilization: float
    """The share of the peak that is assumed."""
    source: str
    """Where that comes from."""
    seconds: float


def plan(
    config: RunConfig,
    world_size: int,
    kind: str,
    utilization: float,
    source: str = STATED,
) -> Plan:
    """What the run of a recipe takes on `world_size` GPUs of a kind.

    Args:
        config: the recipe.
        world_size: GPUs.
        kind: a key of DEVICES.
        utilization: the share of the peak that is reached.
        source: where that comes from.

    Raises:
        ValueError: the recipe names neither a corpus nor `data.vocab_size`, its batch does not
            divide over the ranks, or an argument is out of its range.
    """
    if world_size < 1:
        raise ValueError(f"--gpus {world_size}: accepted: 1 or more")
    if not 0 < utilization <= 1:
        raise ValueError(f"--mfu {utilization}: accepted: above 0, at most 1")
    model = _model(config)
    training = config.training
    settings = deepspeed_settings.read(
        training.deepspeed, config.batch, config.optimizer.gradient_clipping, world_size
    )
    width = weight_bytes(settings)
    stage = int(settings.get("zero_optimization", {}).get("stage", 0))
    rows = math.ceil(model.vocab_size / training.vocabulary_multiple) * training.vocabulary_multiple
    count = parameters(model, model.vocab_size)
    trained = parameters(model, rows)
    length = config.data.sequence_length
    share = config.objective.target_share
    tokens = config.batch.first_block(training.steps) * length
    per_token = flops_per_token(model, length, share)
    rows_at_once, texts = config.batch.micro_batch_size, config.data.packing != "complete"
    bias = (0, 0)
    if training.attention_backend == "dense":
        bias = bias_bytes(model, rows_at_once, length, width, texts)
    saved = activations(
        model, rows_at_once, length, share, width, training.activation_checkpointing, bias
    )
    device = DEVICES[kind]
    stages = range(4) if width == 4 else range(1, 4)
    checkpoint = checkpoint_bytes(trained, width, stage)
    return Plan(
        parameters=count,
        trained_parameters=trained,
        tokens=tokens,
        flops_per_token=per_token,
        flops=per_token * tokens,
        world_size=world_size,
        stage=stage,
        memory={n: Memory(*states(trained, n, world_size, settings), saved) for n in stages},
        checkpoint=checkpoint,
        checkpoints=checkpoint * (max_checkpoints_kept(config) + 1),
        exported=4 * count,
        kind=kind,
        device_memory=device.memory,
        utilization=utilization,
        source=source,
        seconds=per_token * tokens / (world_size * device.flops * utilization),
    )


def _model(config: RunConfig) -> ModelConfig:
    """The model that is meant, with the corpus's vocabulary or the recipe's own word for it."""
    size = config.data.vocab_size
    if config.data.corpus and Path(config.data.corpus).exists():
        size = load_manifest(Path(config.data.corpus)).vocab_size
    if not size:
        raise ValueError(
            "data.vocab_size: is not set, and data.corpus is no folder that is here; name one of "
            "them, such as data.vocab_size=50265"
        )
    recipe = config.model
    return presets.build(recipe.size, recipe.variant, size, recipe.overrides)


def weight_bytes(settings: Mapping[str, Any]) -> int:
    """Bytes of a weight as the forward pass sees it, under settings of DeepSpeed."""
    half = any(settings.get(name, {}).get("enabled", False) for name in ("bf16", "fp16"))
    return 2 if half else 4


def parameters(model: ModelConfig, rows: int) -> int:
    """Numbers that are trained, with a token table of `rows` rows."""
    hidden, inner = model.hidden_size, model.intermediate_size
    count = rows * hidden
    if model.position == "learned":
        count += (model.max_positions + 2) * hidden  # the original's two rows that are never read
    if model.embedding_norm:
        count += 2 * hidden
    attention = 4 * hidden * hidden + 4 * hidden
    feed_forward = 2 * hidden * inner + hidden + inner
    count += model.num_layers * (attention + feed_forward + 4 * hidden)
    if model.head == "clap":
        return count + 1
    return count + hidden * hidden + 3 * hidden + model.vocab_size


def flops_per_token(model: ModelConfig, length: int, masked: float) -> float:
    """Multiplications and additions of a forward and backward pass, for each place of a block.

    The common count (Chowdhery et al. 2022, appendix B): six for each weight of a matrix and token,
    attention over the whole length, the table on the masked places alone; lookups, norms and
    softmax not counted. That the last layer computes its masked places alone is not either, so
    that shares of a peak compare.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    matrices = model.num_layers * (4 * hidden * hidden + 2 * hidden * inner)
    attention = 2 * model.num_layers * length * hidden
    return 6.0 * (matrices + attention + masked * hidden * model.vocab_size)


def states(
    count: int, stage: int, world_size: int, settings: Mapping[str, Any]
) -> tuple[int, int, int, int]:
    """Bytes of weights, gradients, optimiser and DeepSpeed's bucket on one rank, without offload.

    Rajbhandari et al. 2020, section 3.1 and figure 1: wP weights, wP gradients, and in fp32 the
    weights with Adam's two moments, 12 P; stage 1 shares out the last, stage 2 gradients too, stage
    3 all. At stage 0 the weights are fp32 themselves: 8 P; from stage 1 on DeepSpeed holds the
    fp32 copy even then, and may sum gradients in fp32, which the settings say.
    Stage 3 makes a bucket for them at once, however small the model.
    """
    width, part = weight_bytes(settings), math.ceil(count / world_size)
    weights = width * (count if stage < 3 else part)
    summed = settings.get("data_types", {}).get("grad_accum_dtype")
    gradient_width = 4 if summed == "fp32" and stage else width
    gradients = gradient_width * (count if stage < 2 else part)
    zero = settings.get("zero_optimization", {})
    bucket = width * int(zero.get("reduce_bucket_size", DEEPSPEED_BUCKET)) if stage == 3 else 0
    return weights, gradients, 8 * count if stage == 0 else 12 * part, bucket


def bias_bytes(
    model: ModelConfig, rows: int, length: int, width: int, texts: bool
) -> tuple[int, int]:
    """Bytes of the dense back end's attention bias: as the layers read it, and while it is made.

    With ALiBi it has the size of all scores, [B, H, T, T], for every row has its own padding. It is
    made of a table [1, H, T, T], and that of one in fp32 (model/attention.py).

    Args:
        model: the architecture.
        rows: B, of a micro-batch.
        length: T.
        width: w, bytes of a number.
        texts: whether a row holds several texts that do not see each other.
    """
    visible = rows * length**2 if texts else 0  # bool; padding needs none
    if model.method.score_bias is None:
        held = width * (visible or rows * length)
        return held, held + visible
    table = model.num_heads * length**2
    held = width * rows * table
    cast = 4 * table + (width * table if width != 4 else 0)
    return held, max(4 * table + 8 * length**2, cast, width * table + visible + held)


def activations(
    model: ModelConfig,
    rows: int,
    length: int,
    masked: float,
    width: int,
    checkpointing: bool,
    bias: tuple[int, int],
) -> int:
    """Bytes that a micro-batch's forward pass leaves for its backward pass.

    After Korthikanti et al. 2022, section 4.1, with fused attention, which keeps no scores, and the
    norm after the sum: each layer keeps w (8 D + 2 F) a token (its input; query, key and value;
    what was gathered; what entered and left the first norm; two tensors of the feed-forward; what
    entered the second norm), and one byte for each number that dropout may take. The last layer
    keeps what follows its attention for the masked places alone; the logits are kept in w and twice
    in fp32 (the loss; its gradient).

    Args:
        model: the architecture.
        rows: B, of a micro-batch.
        length: T.
        masked: share of places that are predicted.
        width: w, bytes of a number.
        checkpointing: each layer keeps its input alone, and one layer at a time is computed again.
        bias: of attention, see `bias_bytes`. It is made before the first layer, beside the layer's
            input, and read by all.
    """
    tokens = rows * length
    hidden, inner = model.hidden_size, model.intermediate_size
    dropped = hidden if model.dropout else 0
    to_attention = 5 * width * hidden
    after = width * (3 * hidden + 2 * inner) + 2 * dropped
    some = rows * math.ceil(masked * length)
    last = tokens * to_attention + some * after
    layer = tokens * (to_attention + after)
    if checkpointing:
        kept = model.num_layers * tokens * width * hidden + layer
    else:
        kept = (model.num_layers - 1) * layer + last
    logits = some * model.vocab_size * (width + 8)
    held, while_made = bias
    return max(kept + logits + held, tokens * width * hidden + while_made)


def checkpoint_bytes(count: int, width: int, stage: int) -> int:
    """Bytes of a checkpoint of all ranks: wP, and 12 P of the optimiser (see `states`).

    At stage 0 and 3 the weights stand in it once.
    """
    return 12 * count if stage in (0, 3) else (12 + width) * count


def table(planned: Plan) -> str:
    """What was planned, for people."""
    days, hours = planned.seconds / 86400, planned.seconds / 3600
    rows = [
        ("parameters", f"{planned.parameters:,} ({planned.trained_parameters:,} as trained)"),
        ("tokens", f"{planned.tokens:,} (places of blocks, padding included)"),
        ("FLOPs", f"{planned.flops:.3g} ({planned.flops_per_token / 1e6:,.0f} M a token)"),
        (
            "time",
            f"{hours:,.1f} hours ({days:.1f} days) on {planned.world_size} {planned.kind}, "
            f"at {planned.utilization:.0%} of their peak ({planned.source})",
        ),
        (
            "checkpoints",
            f"{planned.checkpoint / 1e9:,.2f} GB each, {planned.checkpoints / 1e9:,.1f} GB at most "
            f"({planned.checkpoints // planned.checkpoint} at once, rollback targets included)",
        ),
        ("exported", f"{planned.exported / 1e9:,.2f} GB"),
    ]
    lines = [f"{name:12} {text}" for name, text in rows]
    heads = ("weights", "gradients", "optimizer", "bucket", "activations", "total")
    lines += ["", "GB a rank".ljust(12) + "".join(f"{head:>12}" for head in heads)]
    for stage, memory in planned.memory.items():
        mark = " <- the recipe's" if stage == planned.stage else ""
        if memory.total > planned.device_memory:
            mark += f" (a {planned.kind} has {planned.device_memory / 1e9:.0f})"
        figures = "".join(f"{getattr(memory, head) / 1e9:12.2f}" for head in heads)
        lines.append(f"ZeRO {stage}".ljust(12) + figures + mark)
    return "\n".join(lines) + "\n"
