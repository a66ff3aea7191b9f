"""The cost of a recipe before it is run: parameters, memory, time, checkpoints.

Notation: P parameters as trained, w bytes per weight (2 in bf16 and fp16, 4 in fp32); the shape
letters are those of pretrain/model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_prep.corpus import Corpus
from data_prep.manifest import load_manifest
from pretrain.config.phases import Phase
from pretrain.config.run import RunConfig
from pretrain.data.sources import SOURCES
from pretrain.engine import settings as deepspeed_settings
from pretrain.model.config import ModelConfig, check_backend, choose_backend
from pretrain.spikes.policy import max_checkpoints_kept, usual_checkpoints_kept


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU according to its data sheet."""

    flops: float
    """Peak dense bf16 FLOP/s."""
    memory: float
    """Bytes."""


DEVICES = {
    "a100-40gb": Device(312e12, 40e9),
    "a100": Device(312e12, 80e9),
    "h100": Device(989e12, 80e9),
    "h200": Device(989e12, 141e9),
}
"""NVIDIA's SXM cards. Where a name fits several, the first counts (see `kind_of`)."""

HEADROOM = 0.9
"""Share of a GPU's memory that a plan may fill: CUDA itself, kernel workspaces and the allocator's
fragments take some, which `Memory` does not count."""
STATED = "stated, not measured"
"""Source of a utilization that the user gave."""
DEEPSPEED_BUCKET = 500_000_000
"""DeepSpeed 0.19's default of reduce_bucket_size, in elements."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one rank, without allocator overhead and kernel workspaces."""

    weights: int
    gradients: int
    optimizer: int
    """In host memory if it is offloaded."""
    bucket: int
    """DeepSpeed's communication buffer for gradients."""
    activations: int
    offloaded: bool
    """Whether the optimizer state is in host memory."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        parts = (self.weights, self.gradients, self.optimizer, self.bucket, self.activations)
        return sum(parts)

    @property
    def on_device(self) -> int:
        """Sum of the parts on the GPU."""
        return self.total - (self.optimizer if self.offloaded else 0)

    def fits(self, device_memory: float) -> bool:
        """Whether a GPU of so many bytes can hold this."""
        return self.on_device <= HEADROOM * device_memory


@dataclasses.dataclass(frozen=True)
class Fit:
    """What an attention back end needs at the recipe's ZeRO stage."""

    backend: str
    problem: str
    """Why it cannot compute the model; "" if it can."""
    micro_batch_size: int
    """The recipe's."""
    bytes: int
    """On the GPU, with the recipe's micro-batch."""
    largest: int
    """The largest micro-batch that fits, of those that divide the batch; 0 if none does."""
    largest_bytes: int
    """On the GPU, with the largest."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a run reads of the train split of a corpus."""

    blocks: int
    """Blocks of the split."""
    tokens: int
    """Tokens of the split."""
    share_of_tokens: float
    """Share of these tokens that the blocks hold."""
    fill: float
    """Share of the blocks' capacity that holds tokens."""
    epochs: float
    """Blocks that the run reads over blocks of the split."""


@dataclasses.dataclass(frozen=True)
class PhaseCost:
    """What one phase of a run costs."""

    name: str
    steps: int
    blocks: int
    tokens: int
    flops_per_token: float
    seconds: float

    @property
    def flops(self) -> float:
        """Of the whole phase."""
        return self.flops_per_token * self.tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a run; sizes in bytes."""

    parameters: int
    """As exported, without the padding rows of the token table."""
    trained_parameters: int
    """As trained, with the padding rows."""
    tokens: int
    """Tokens in all blocks; padding counts, because it is computed."""
    reading: dict[str, Reading] | None
    """Of each corpus by name, the name of a single one is ""; None: one is not on this machine."""
    flops_per_token: float
    flops: float
    world_size: int
    stage: int
    """The recipe's ZeRO stage."""
    backend: str
    """Attention back end that the recipe takes on a GPU."""
    memory: dict[int, Memory]
    """By ZeRO stage, with that back end."""
    fits: list[Fit]
    """Of every back end."""
    checkpoint: int
    checkpoints_newest: int
    """Newest checkpoints that are kept whatever happens."""
    checkpoints_usual: int
    """Number kept while no spike is suspected."""
    checkpoints_most: int
    """Most on disk at once: the newest, rollback targets, one that is being written. Of the
    newest two, those that were saved at a stop, between regular ones, come in addition."""
    exported: int
    kind: str
    device_memory: float
    utilization: float
    """Assumed share of the peak FLOP/s."""
    source: str
    """Where the utilization comes from."""
    seconds: float
    phases: list[PhaseCost] = dataclasses.field(default_factory=list)
    """Of a run with phases; the memory is that of the phase that needs most."""


def plan(
    config: RunConfig, world_size: int, kind: str, utilization: float, source: str = STATED
) -> Plan:
    """Compute the cost of a recipe.

    Args:
        config: the recipe.
        world_size: number of GPUs.
        kind: a key of DEVICES.
        utilization: share of the peak FLOP/s that is reached.
        source: where `utilization` comes from.

    Raises:
        ValueError: the recipe names neither a corpus nor `data.vocab_size`, its batch does not
            divide over the ranks, or an argument is out of range.
    """
    if world_size < 1:
        raise ValueError(f"--gpus {world_size}: accepted: 1 or more")
    if not 0 < utilization <= 1:
        raise ValueError(f"--mfu {utilization}: accepted: above 0, at most 1")
    model = model_of(config)
    training = config.training
    settings = deepspeed_settings.read(
        training.deepspeed,
        config.phase(0).config.batch,
        config.optimizer.gradient_clipping,
        world_size,
    )
    width = weight_bytes(settings)
    stage = int(settings.get("zero_optimization", {}).get("stage", 0))
    count, trained = parameters(model), parameters(model, training.vocabulary_multiple)
    device = DEVICES[kind]
    costs = _phase_costs(config, model, world_size * device.flops * utilization)
    tokens, flops = sum(cost.tokens for cost in costs), sum(cost.flops for cost in costs)
    blocks = sum(cost.blocks for cost in costs)
    backend = choose_backend(model, training.attention_backend, on_gpu=True)
    stages = range(4) if width == 4 else range(1, 4)

    def needs(phase: Phase) -> int:
        rows = phase.config.batch.micro_batch_size
        return _activations_with(phase.config, model, backend, rows, width)

    heaviest = max(config.resolved_phases, key=needs).config

    def memory(backend: str, rows: int, stage: int) -> Memory:
        kept = _activations_with(heaviest, model, backend, rows, width)
        return Memory(*states(trained, stage, world_size, settings), kept, _offloads(settings))

    fits = [
        _fit(
            heaviest, model, name, device.memory, world_size, functools.partial(memory, stage=stage)
        )
        for name in ("dense", "flex")
    ]
    return Plan(
        parameters=count,
        trained_parameters=trained,
        tokens=tokens,
        reading=_reading(config, blocks),
        flops_per_token=flops / tokens if config.phases else costs[0].flops_per_token,
        flops=flops,
        world_size=world_size,
        stage=stage,
        backend=backend,
        memory={n: memory(backend, heaviest.batch.micro_batch_size, n) for n in stages},
        fits=fits,
        checkpoint=checkpoint_bytes(trained, width, stage),
        checkpoints_newest=training.checkpoints_kept,
        checkpoints_usual=usual_checkpoints_kept(config),
        checkpoints_most=max_checkpoints_kept(config) + 1,
        exported=4 * count,
        kind=kind,
        device_memory=device.memory,
        utilization=utilization,
        source=source,
        seconds=sum(cost.seconds for cost in costs),
        phases=costs if config.phases else [],
    )


def _phase_costs(config: RunConfig, model: ModelConfig, flops_per_second: float) -> list[PhaseCost]:
    """Return the cost of each phase of a run on devices of so many FLOP/s."""
    costs = []
    for phase in config.resolved_phases:
        data, first_block = phase.config.data, config.sizes.first_block
        blocks = first_block(phase.end_step) - first_block(phase.first_step)
        per_token = flops_per_token(
            model, data.sequence_length, phase.config.objective.target_share
        )
        tokens = blocks * data.sequence_length
        seconds = per_token * tokens / flops_per_second
        steps = phase.end_step - phase.first_step
        costs.append(PhaseCost(str(phase), steps, blocks, tokens, per_token, seconds))
    return costs


def kind_of(name: str) -> str | None:
    """Return the key of DEVICES for a GPU's name, such as "NVIDIA A100-SXM4-40GB".

    None for other GPUs, and for the PCIe and NVL cards of Hopper, which have lower rates.
    """
    words = name.lower()
    if "a100" not in words and ("pcie" in words or "nvl" in words):
        return None
    return next((kind for kind in DEVICES if all(w in words for w in kind.split("-"))), None)


def _offloads(settings: Mapping[str, Any]) -> bool:
    """Whether the optimizer state is in host memory."""
    zero = settings.get("zero_optimization", {})
    return bool(zero.get("offload_optimizer", {}).get("device", "none") != "none")


def _activations_with(
    config: RunConfig, model: ModelConfig, backend: str, rows: int, width: int
) -> int:
    """Return the bytes of `activations` with an attention back end and so many rows."""
    length, packed = config.data.sequence_length, SOURCES[config.data.packing].documents_apart
    bias = bias_bytes(model, rows, length, width, packed) if backend == "dense" else (0, 0)
    checkpointing = config.training.activation_checkpointing
    share = config.objective.target_share
    return activations(model, rows, length, share, width, checkpointing, bias)


def _fit(
    config: RunConfig,
    model: ModelConfig,
    backend: str,
    device_memory: float,
    world_size: int,
    memory: Callable[[str, int], Memory],
) -> Fit:
    """Return which micro-batches fit a GPU with an attention back end."""
    problem = ""
    try:
        check_backend(model, backend)
    except ValueError as error:
        problem = str(error)
    rows, blocks = config.batch.micro_batch_size, config.batch.size(0) // world_size
    sizes = [
        size
        for size in range(1, blocks + 1)
        if blocks % size == 0 and memory(backend, size).fits(device_memory)
    ]
    largest = max(sizes, default=0)
    largest_bytes = memory(backend, largest).on_device if largest else 0
    return Fit(backend, problem, rows, memory(backend, rows).on_device, largest, largest_bytes)


def model_of(config: RunConfig) -> ModelConfig:
    """Return the model's config, with the corpus's vocabulary or `data.vocab_size`.

    Raises:
        ValueError: neither is known.
    """
    size = config.data.vocab_size
    for folder in _folders(config)[:1]:  # all have the same vocabulary
        size = load_manifest(folder).vocab_size
    if not size:
        raise ValueError(
            "data.vocab_size: is not set, and data.corpus is not a folder on this machine; set one "
            "of them, such as data.vocab_size=50265"
        )
    return config.architecture(size)


def _folders(config: RunConfig) -> list[Path]:
    """Return the folders of `config.streams` that are on this machine."""
    folders = (Path(stream.path) for stream in config.streams)
    return [folder for folder in folders if folder.exists()]


def _reading(config: RunConfig, blocks: int) -> dict[str, Reading] | None:
    """Return what a run of so many blocks reads of each corpus; None if one is not here."""
    folders = _folders(config)
    if not folders or len(folders) < len(config.streams):
        return None
    found = {}
    draws = config.mixture().counts(blocks)
    for stream, folder, drawn in zip(config.streams, folders, draws, strict=True):
        corpus = Corpus(folder, "train")
        source = SOURCES[stream.packing](corpus, stream.sequence_length)
        tokens, share = int(corpus.lengths.sum()), source.share_of_tokens
        found[stream.name] = Reading(len(source), tokens, share, source.fill, drawn / len(source))
    return found


def weight_bytes(settings: Mapping[str, Any]) -> int:
    """Return the bytes per weight in the forward pass under DeepSpeed settings."""
    half = any(settings.get(name, {}).get("enabled", False) for name in ("bf16", "fp16"))
    return 2 if half else 4


def parameters(model: ModelConfig, vocabulary_multiple: int = 1) -> int:
    """Count the parameters of a model whose token table is padded to a multiple of rows."""
    import torch

    from pretrain.model.language_model import LanguageModel

    with torch.device("meta"):
        built = LanguageModel(model, vocabulary_multiple)
    return sum(parameter.numel() for parameter in built.parameters())


def flops_per_token(model: ModelConfig, length: int, masked: float) -> float:
    """Return the FLOPs per token of a forward and backward pass.

    The common count (Chowdhery et al. 2022, appendix B): 6 per matrix weight, attention over the
    whole length, or a layer's window, the vocabulary at masked tokens only; lookups, norms and
    softmax are not counted.
    The last layer, which runs at masked tokens only, is counted in full, so that utilizations
    compare with published ones.
    """
    hidden, inner, size = model.hidden_size, model.intermediate_size, model.token_size
    # The first and the last layer together work once on the tokens and once on the latents.
    latents = min(model.latents, length) or length
    layers = 1 + (model.num_layers - 1) * latents / length
    feed_forward = (3 if model.gated else 2) * hidden * inner
    matrices = layers * (4 * hidden * hidden + feed_forward)
    matrices += size * hidden if size < hidden else 0
    pairs = 2 * latents + (model.num_layers - 2) * latents**2 / length
    # A window has so many keys but at the ends of the text.
    pairs += sum(min(window + 1, length) - length for window in model.windows if window)
    attention = 2 * pairs * hidden
    head = hidden if model.head == "untied" else size
    return 6.0 * (matrices + attention + masked * head * model.vocab_size)


def states(
    count: int, stage: int, world_size: int, settings: Mapping[str, Any], moments: float = 2.0
) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients, optimizer state and bucket on one rank.

    Without offload. Rajbhandari et al. 2020, section 3.1 and figure 1: wP for weights, wP for
    gradients, and 12 P for the fp32 weights with two moments (Muon has one for its matrices, which
    `moments`, a mean over the parameters, says; a plan leaves that out). Stage 1 partitions the
    optimizer state, stage 2 the gradients too, stage 3 everything. At stage 0 the weights
    themselves are fp32, which leaves 8 P; from stage 1 on DeepSpeed keeps an fp32 copy even of fp32
    weights, and accumulates gradients in `grad_accum_dtype`. Stage 3 allocates its bucket at once,
    however small the model.
    """
    width, part = weight_bytes(settings), math.ceil(count / world_size)
    weights = width * (count if stage < 3 else part)
    summed = settings.get("data_types", {}).get("grad_accum_dtype")
    gradient_width = 4 if summed == "fp32" and stage else width
    gradients = gradient_width * (count if stage < 2 else part)
    zero = settings.get("zero_optimization", {})
    bucket = width * int(zero.get("reduce_bucket_size", DEEPSPEED_BUCKET)) if stage == 3 else 0
    optimizer = int(4 * moments * count if stage == 0 else (4 + 4 * moments) * part)
    return weights, gradients, optimizer, bucket


def least_states(config: RunConfig, model: ModelConfig, world_size: int) -> tuple[int, int, int]:
    """Return lower bounds of what a run needs, without importing torch.

    Counts matrices and the tables of tokens and positions only, and no activations.

    Returns:
        The number of parameters, and the bytes of a rank's weights, gradients and optimizer state
        on its device and, where they are offloaded, in host memory.
    """
    hidden, inner, groups = model.hidden_size, model.intermediate_size, model.layer_groups
    attentions = groups if model.shares_attention else model.num_layers
    feed_forwards = groups if model.shares_feed_forward else model.num_layers
    count = attentions * 4 * hidden**2
    count += feed_forwards * (3 if model.gated else 2) * hidden * inner
    count += model.token_size * (model.vocab_size + (model.longest_input or 0))
    count += model.hidden_size * model.vocab_size if model.head == "untied" else 0
    clipping = config.optimizer.gradient_clipping
    settings = deepspeed_settings.read(
        config.training.deepspeed, config.phase(0).config.batch, clipping, world_size
    )
    zero = settings.get("zero_optimization", {})
    moments = 1.0 if config.optimizer.name == "muon" else 2.0
    weights, gradients, optimizer, _ = states(
        count, int(zero.get("stage", 0)), world_size, settings, moments
    )
    optimizer_device, weights_device = (
        zero.get(name, {}).get("device", "none") for name in ("offload_optimizer", "offload_param")
    )
    device = 0 if weights_device != "none" else weights
    # Offloaded with the optimizer's state, gradients pass through the GPU one by one.
    device += 0 if optimizer_device != "none" else gradients + optimizer
    host = weights if weights_device == "cpu" else 0
    host += optimizer if optimizer_device == "cpu" else 0
    return count, device, host


def bias_bytes(
    model: ModelConfig, rows: int, length: int, width: int, packed: bool
) -> tuple[int, int]:
    """Return the bytes of the dense back end's attention bias: kept, and at most while it is built.

    With ALiBi it has the size of all scores, [B, H, T, T], because every row has its own padding.
    It is built from a table [1, H, T, T] that is cast from fp32 (model/attention.py). Causal models
    need no mask of padding, so that rows share what they have.

    Args:
        model: the architecture.
        rows: B, rows per micro-batch.
        length: T, tokens per row.
        width: w, bytes per number.
        packed: whether a row holds several documents.
    """
    if model.local_window:
        whole = bias_bytes(dataclasses.replace(model, local_window=0), rows, length, width, packed)
        # A second one, with a mask of all pairs.
        local = dataclasses.replace(model, local_window=0, causal=False)
        kept, peak = bias_bytes(local, rows, length, width, True)
        return whole[0] + kept, max(whole[0] + peak, whole[1] + kept)
    if model.causal and not packed:
        rows = 1
        if model.method.score_bias is None:
            return 0, 0
    visible = rows * length**2 if packed else 0  # bool; padding needs none
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
    """Return the bytes that the forward pass of a micro-batch saves for the backward pass.

    After Korthikanti et al. 2022, section 4.1, for fused attention, which saves no scores, and
    post-norm layers. Each layer saves w (8 D + 2 F) per token (its input; query, key and value; the
    attention output; input and output of the first norm; two feed-forward tensors, with a gate
    four; input of the second norm) and one byte per element under dropout. After its attention the
    last layer saves masked tokens only. The logits are saved in w and twice in fp32 (the loss and
    its gradient). Latents count as tokens, so that this is an upper bound where a model has any.

    Args:
        model: the architecture.
        rows: B, rows per micro-batch.
        length: T, tokens per row.
        masked: share of tokens that are predicted.
        width: w, bytes per number.
        checkpointing: whether each layer saves its input only and is recomputed, one at a time.
        bias: result of `bias_bytes`. The bias is built before the first layer, when only the
            layer's input is saved, and is read by all layers.
    """
    tokens = rows * length
    hidden, inner = model.hidden_size, model.intermediate_size
    dropout = 2 * hidden if model.dropout else 0
    inner_tensors = (4 if model.gated else 2) * inner
    attention, rest = 5 * width * hidden, width * (3 * hidden + inner_tensors) + dropout
    predicted = rows * math.ceil(masked * length)
    layer = tokens * (attention + rest)
    if checkpointing:
        saved = model.num_layers * tokens * width * hidden + layer
    else:
        saved = (model.num_layers - 1) * layer + tokens * attention + predicted * rest
    logits = predicted * model.vocab_size * (width + 8)
    bias_kept, bias_peak = bias
    return max(saved + logits + bias_kept, tokens * width * hidden + bias_peak)


def checkpoint_bytes(count: int, width: int, stage: int) -> int:
    """Return the bytes of a checkpoint of all ranks: 12 P (see `states`), and wP at stage 1 and 2.

    At stages 0 and 3 the weights are stored once, in fp32.
    """
    return 12 * count if stage in (0, 3) else (12 + width) * count
