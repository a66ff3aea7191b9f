"""How long an update takes, by a roofline: work that is counted over rates that are stated.

The work of a micro-batch is counted by formulas: FLOPs of matrix products and of attention, bytes
that all other operations move. tests/pretrain/plan/test_roofline.py compares them with what torch
and its compiler count. Rates are shares of a data sheet (checks/devices.py). Those of Hopper were
measured on an H100 80GB HBM3 with torch 2.11 on 2026-11-26; those of the A100 are estimates.

Not counted: reading data, validation, checkpoints; Muon's own products; what FlexAttention saves
where rows hold several documents, except in the rows of `bench`: it depends on the corpus.

Notation: B, T, D, F as in pretrain/model; P parameters; w bytes per weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pretrain.checks import needs
from pretrain.checks.devices import DEVICES
from pretrain.config import deepspeed as deepspeed_settings
from pretrain.config.run import RunConfig
from pretrain.data.sources import SOURCES
from pretrain.model.backends import choose_backend
from pretrain.model.config import VOCABULARY_MULTIPLE, ModelConfig

UNCERTAINTY = 0.25
"""Relative, of a speed that is expected by stated rates."""
_TILE = 128
"""Side of the squares of scores that FlexAttention computes or skips."""
_FORWARD_AND_BACKWARD = 3
"""Matrix products of a forward and a backward pass, per product of the forward pass."""
_GPUS_OF_A_MACHINE = 8
"""More are several machines, whose network is slower than NVLink."""
_HOST_BYTES_PER_SECOND = 20e9
"""Of a rank's share of host memory, for an offloaded optimizer; a guess."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Shares of a data sheet that kernels reach."""

    matrices: float
    """Of the peak FLOP/s, for the products of models of these sizes with thousands of tokens."""
    flex: float
    """Of the peak FLOP/s, for FlexAttention, forward and backward."""
    scores: tuple[float, float]
    """Of the peak FLOP/s, for torch's fused attention that reads a bias for each score, without
    attention dropout and with it."""
    keys: tuple[float, float]
    """The same where it reads a mask of keys."""
    plain: tuple[float, float]
    """The same where it reads neither."""
    compiled: float = 0.80
    """Of the memory's bytes/s, for kernels of torch.compile."""
    eager: float = 0.55
    """Of the memory's bytes/s, for kernels of single operations, and the optimizer."""
    link: float = 0.75
    """Of the bytes/s between GPUs, for collectives."""


_AMPERE = Rates(0.74, flex=0.45, scores=(0.35, 0.27), keys=(0.42, 0.30), plain=(0.55, 0.40))
_HOPPER = Rates(0.60, flex=0.256, scores=(0.232, 0.157), keys=(0.30, 0.180), plain=(0.405, 0.250))
RATES = {"a100-40gb": _AMPERE, "a100": _AMPERE, "h100": _HOPPER, "h200": _HOPPER}
"""By the keys of DEVICES. With 64 numbers per head."""
_FOUR_DOCUMENTS = 0.7
"""Time of FlexAttention in rows of four documents over that in rows of one; measured as `Rates`."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """How often the operations of a layer read or write a number, for each token.

    Forward and backward, without matrix products and the attention kernel, in numbers of vectors of
    size D and F.
    """

    attention: int
    """D: query, key and value brought into their order; the sum of gradients at a layer's input."""
    rotation: int
    """D: more of that with rotary positions."""
    rest: int
    """D: norms and residual sums, after attention."""
    dropout: float
    """D: more of that with dropout."""
    inner: int
    """F: the activation."""
    gate: tuple[int, int]
    """D and F: more with a gate."""
    biases: tuple[int, int, int]
    """D in attention, D after it, F: gradients of biases (a gate has one of size F more)."""
    logits: int
    """Numbers of the logits: the loss in fp32."""
    normalized_table: int
    """Numbers of the token table, where the head normalises it."""


_EAGER = Passes(15, 122, 19, 10, 5, (3, 9), (3, 2, 1), logits=24, normalized_table=23)
_COMPILED = Passes(9, 22, 22, 7.5, 5, (2, 3), (3, 1, 1), logits=6, normalized_table=6)
_EMBEDDING = 44
"""Passes over [B, T, D]: embeddings, which are not compiled, and the choice of target tokens."""
_TABLE = 5
"""Passes over the token table: the gradients of both of its uses."""
_FORWARD = (8, 2)
"""Passes over D and F of a layer's forward pass, which is repeated under checkpointing."""
_HOST_SECONDS_PER_LAYER = {False: 1.4e-3, True: 0.8e-3}
"""Time of the host to launch the kernels of a layer, forward and backward, eager and compiled; a
guess. A micro-batch takes at least so long."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What one GPU computes for a micro-batch, forward and backward."""

    matrices: float
    """FLOPs of matrix products."""
    attention: float
    """FLOPs of attention; its backward pass computes the scores again."""
    elementwise: float
    """Bytes that all other operations read and write."""


def work(config: RunConfig, model: ModelConfig, backend: str, compiled: bool, width: int) -> Work:
    """Count the work of a micro-batch.

    Args:
        config: the recipe, or that of a phase.
        model: the architecture.
        backend: of attention, "dense" or "flex".
        compiled: whether layers, head and loss are compiled.
        width: w, bytes per weight.
    """
    hidden, inner, length = model.hidden_size, model.intermediate_size, config.data.sequence_length
    rows, share = config.batch.micro_batch_size, config.objective.target_share
    packed = SOURCES[config.data.packing].documents_apart
    feed_forward = (3 if model.gated else 2) * hidden * inner
    passes = _COMPILED if compiled else _EAGER
    vocabulary = math.ceil(model.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    targets = math.ceil(share * length)
    again = int(config.training.activation_checkpointing)
    matrices = attention = numbers = 0.0
    for number, (queries, keys, seen) in enumerate(_layers(model, length, backend)):
        after = queries if number < model.num_layers - 1 else targets
        matrices += hidden**2 * (queries + 2 * keys + after) + feed_forward * after
        attention += 2 * queries * seen * hidden
        numbers += _attention_passes(model, passes) * hidden * queries
        numbers += _passes_after(model, passes) * after
        repeated = _FORWARD[0] + (passes.dropout / 2 if model.dropout else 0)
        numbers += again * (repeated * hidden + _FORWARD[1] * inner) * after
    size = hidden if model.head == "untied" else model.token_size
    head = targets * size * vocabulary
    head += targets * hidden * size if model.head == "roberta" else 0
    head += length * model.token_size * hidden if model.token_size < hidden else 0
    numbers += _EMBEDDING * hidden * length + passes.logits * targets * vocabulary
    normalizes = model.head == "clap" and model.normalize_embeddings
    table = (_TABLE + (passes.normalized_table if normalizes else 0)) * size * vocabulary
    bias = 0
    if backend == "dense":
        bias, _ = needs.bias_bytes(model, rows, length, width, packed)
    return Work(
        matrices=2 * rows * ((_FORWARD_AND_BACKWARD + again) * matrices + 3 * head),
        # Forward two products of scores, backward five.
        attention=2 * rows * attention * (3.5 + again),
        elementwise=width * (rows * numbers + table) + bias,
    )


def _layers(model: ModelConfig, length: int, backend: str) -> Iterator[tuple[int, int, int]]:
    """Yield the queries and keys of each layer, and how many keys a query is compared with."""
    latents = min(model.latents, length) or length
    for number, window in enumerate(model.windows):
        queries = length if number == model.num_layers - 1 else latents
        keys = length if number == 0 else latents
        seen = keys
        if backend == "flex":
            seen = min(seen, _TILE * (1 + 2 * math.ceil(window / 2 / _TILE))) if window else seen
            seen = min(seen, (length + _TILE) // 2) if model.causal else seen
        yield queries, keys, seen


def _attention_passes(model: ModelConfig, passes: Passes) -> int:
    """Return the passes over D that belong to attention, for each token."""
    rotation = passes.rotation if model.method.rotation else 0
    return passes.attention + rotation + (passes.biases[0] if model.biases else 0)


def _passes_after(model: ModelConfig, passes: Passes) -> float:
    """Return the numbers that are read and written after attention, for each token."""
    wide, inner = passes.rest + (passes.dropout if model.dropout else 0), passes.inner
    if model.gated:
        wide, inner = wide + passes.gate[0], inner + passes.gate[1]
    if model.biases:
        wide, inner = wide + passes.biases[1], inner + passes.biases[2] * (1 + model.gated)
    return wide * model.hidden_size + inner * model.intermediate_size


@dataclasses.dataclass(frozen=True)
class Expected:
    """Seconds that updates are expected to take, by what they are spent on."""

    parts: Mapping[str, float]
    """matrices, attention, elementwise, launches (waiting for the host), communication,
    optimizer."""

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())


def expect(
    config: RunConfig,
    model: ModelConfig,
    world_size: int,
    kind: str,
    updates: int = 1,
    blocks: int = 0,
    in_bench: bool = False,
) -> Expected:
    """Estimate how long updates take.

    Args:
        config: the recipe, or that of a phase.
        model: the architecture.
        world_size: number of GPUs.
        kind: a key of DEVICES.
        updates: number of them.
        blocks: that they read in all; 0: those of one update at the full batch size.
        in_bench: whether rows are those of `bench`: full, and of four documents where a row may
            hold several.
    """
    device, rates, batch = DEVICES[kind], RATES[kind], config.batch
    settings = deepspeed_settings.read_settings(
        config.training.deepspeed, batch, config.optimizer.gradient_clipping, world_size
    )
    width = needs.weight_bytes(settings)
    backend = choose_backend(model, config.training.attention_backend, on_gpu=True)
    compiled = deepspeed_settings.compiles(config.training.compile, settings, on_gpu=True)
    peak = device.flops if width == 2 else device.fp32_flops
    count = needs.parameters(model, VOCABULARY_MULTIPLE)
    done = work(config, model, backend, compiled, width)
    attention = _attention_rate(config, model, backend, rates, in_bench) * peak
    eager = rates.eager * device.bandwidth
    micro = {
        "matrices": done.matrices / (rates.matrices * peak),
        "attention": done.attention / attention,
        "elementwise": done.elementwise
        / ((rates.compiled if compiled else rates.eager) * device.bandwidth)
        + _accumulated_bytes(count, width, settings) / eager,
    }
    host = model.num_layers * _HOST_SECONDS_PER_LAYER[compiled]
    micro["launches"] = max(0.0, host - sum(micro.values()))
    each, once = _exchanged_bytes(count, width, settings, world_size)
    over = rates.link * (device.link if world_size <= _GPUS_OF_A_MACHINE else device.network)
    micro["communication"] = each / over
    part = math.ceil(count / world_size) if deepspeed_settings.stage_of(settings) else count
    is_offloaded = deepspeed_settings.offload_device(settings, "offload_optimizer") != "none"
    # Weight, two moments and the gradient are read, the first three written, and the weight cast.
    optimizer = (7 * 4 + width) * part / (_HOST_BYTES_PER_SECOND if is_offloaded else eager)
    micro_batches = (blocks or updates * batch.global_batch_size) / (
        batch.micro_batch_size * world_size
    )
    parts = {name: micro_batches * seconds for name, seconds in micro.items()}
    parts["communication"] += updates * once / over
    return Expected({**parts, "optimizer": updates * optimizer})


def _attention_rate(
    config: RunConfig, model: ModelConfig, backend: str, rates: Rates, in_bench: bool
) -> float:
    """Return the share of the peak that attention reaches."""
    packed = SOURCES[config.data.packing].documents_apart
    is_full = in_bench or config.data.packing == "contiguous"
    reads_scores = model.method.score_bias is not None or packed or model.local_window
    if backend == "flex" and (reads_scores or not is_full):
        return rates.flex / (_FOUR_DOCUMENTS if packed and in_bench else 1.0)
    by_dropout = rates.scores if reads_scores else rates.plain if is_full else rates.keys
    return by_dropout[model.attention_dropout > 0]


def _accumulated_bytes(count: int, width: int, settings: Mapping[str, Any]) -> int:
    """Return the bytes that adding a micro-batch's gradient to the sum moves."""
    summed = settings.get("data_types", {}).get("grad_accum_dtype")
    sum_width = 4 if summed == "fp32" else width
    return (width + 2 * sum_width) * count


def _exchanged_bytes(
    count: int, width: int, settings: Mapping[str, Any], world_size: int
) -> tuple[float, float]:
    """Return the bytes that a GPU sends for each micro-batch, and once an update.

    As the engine does (overlap_comm false): stages 0 and 1 reduce gradients once, stage 2 at every
    micro-batch, each to all ranks; stages 1 and 2 gather the weights after the update; stage 3
    gathers them in both passes, and leaves each rank its part of the gradient.
    """
    numbers = count * (world_size - 1) / world_size
    weights = width * numbers
    reduced = (4 if settings.get("communication_data_type") == "fp32" else width) * numbers
    by_stage = [
        (0.0, 2 * reduced),
        (0.0, 2 * reduced + weights),
        (2 * reduced, weights),
        (2 * weights + reduced, 0.0),
    ]
    return by_stage[deepspeed_settings.stage_of(settings)]
