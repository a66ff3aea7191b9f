"""What a model needs: parameters, operations, and bytes of memory and on disk.

Notation: P parameters as trained, w bytes per weight (2 in bf16 and fp16, 4 in fp32); the shape
letters are those of pretrain/model.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.config import deepspeed as deepspeed_settings
from pretrain.config.run import RunConfig
from pretrain.model.config import ModelConfig

DEEPSPEED_BUCKET = 500_000_000
"""DeepSpeed 0.19's default of reduce_bucket_size, in elements."""
DS_CONFIGS_BUCKET = 50_000_000
"""That of every file in ds_configs at stages 2 and 3."""


def weight_bytes(settings: Mapping[str, Any]) -> int:
    """Return the bytes per weight in the forward pass under DeepSpeed settings."""
    return 2 if deepspeed_settings.half_precisions(settings) else 4


@functools.cache
def parameters(model: ModelConfig, vocabulary_multiple: int = 1) -> int:
    """Count the parameters of a model whose token table is padded to a multiple of rows."""
    import torch

    from pretrain.model.language_model import LanguageModel

    with torch.device("meta"):
        built = LanguageModel(model, vocabulary_multiple)
    return sum(parameter.numel() for parameter in built.parameters())


def flops_per_token(
    model: ModelConfig, length: int, masked: float, pairs: float | None = None
) -> float:
    """Return the FLOPs per token of a forward and backward pass.

    The common count (Chowdhery et al. 2022, appendix B): 6 per matrix weight, attention over the
    whole length, or a layer's window, the vocabulary at masked tokens only; lookups, norms and
    softmax are not counted.
    The last layer, which runs at masked tokens only, is counted in full, so that utilizations
    compare with published ones.

    Args:
        model: the architecture.
        length: tokens per row.
        masked: share of tokens that are predicted.
        pairs: of positions, over positions, of all layers; None: as above.
    """
    hidden, inner, size = model.hidden_size, model.intermediate_size, model.token_size
    # The first and the last layer together work once on the tokens and once on the latents.
    layers = 1 + (model.num_layers - 1) * (min(model.latents, length) or length) / length
    feed_forward = (3 if model.gated else 2) * hidden * inner
    matrices = layers * (4 * hidden * hidden + feed_forward)
    matrices += size * hidden if size < hidden else 0
    if pairs is None:
        pairs = _pairs_without_masks(model, length)
        # A window has so many keys but at the ends of the text.
        pairs += sum(min(window + 1, length) - length for window in model.windows if window)
    attention = 2 * pairs * hidden
    head = hidden if model.head == "untied" else size
    return 6.0 * (matrices + attention + masked * head * model.vocab_size)


def _pairs_without_masks(model: ModelConfig, length: int) -> float:
    """Return the pairs of positions, over positions, of all layers."""
    latents = min(model.latents, length) or length
    return 2 * latents + (model.num_layers - 2) * latents**2 / length


def computed_pairs(model: ModelConfig, backend: str, document_ids: NDArray[np.generic]) -> float:
    """Return the pairs of positions that attention computes in a micro-batch, of all layers.

    `flex` leaves out the pairs that a mask hides (model/masks.py); `dense` computes all.

    Args:
        model: the architecture.
        backend: of attention, "dense" or "flex".
        document_ids: of the micro-batch, [B, T]; the tokens of a document stand together.
    """
    length = document_ids.shape[1]
    if backend == "dense":
        return document_ids.size * _pairs_without_masks(model, length)
    is_row = document_ids.dtype == bool  # one document, whose tokens all queries of the row see
    if is_row and not model.causal:
        sizes = document_ids.sum(axis=1)
    else:
        # np.diff of the ids takes two to five times as long, and a GPU waits for this.
        ends = np.ones(document_ids.shape, bool)
        ends[:, :-1] = False if is_row else document_ids[:, 1:] != document_ids[:, :-1]
        sizes = np.diff(np.flatnonzero(ends), prepend=-1)
    found = 0.0
    for window, layers in collections.Counter(model.windows).items():
        reach = window // 2 if window else length
        seen = _near(sizes, reach)
        if model.causal:
            seen = (seen + sizes) / 2
        elif is_row:  # queries at padding see half of what the rest of the square does
            seen = (seen + _near(length, reach) - _near(length - sizes, reach)) / 2
        found += layers * float(seen.sum())
    return found


def _near(size: Any, reach: int) -> Any:  # noqa: ANN401 - a number, or an array of them
    """Return how many pairs of so many positions are at most `reach` apart."""
    beyond = np.maximum(size - reach, 1)
    return size**2 - beyond * (beyond - 1)


def work(config: RunConfig, model: ModelConfig) -> tuple[int, int, float]:
    """Return the blocks, tokens and FLOPs of a run, over all phases."""
    blocks, tokens, flops = 0, 0, 0.0
    for phase in config.segments.parts:
        length, first_block = phase.config.data.sequence_length, config.segments.sizes.first_block
        read = first_block(phase.end_step) - first_block(phase.first_step)
        share = phase.config.objective.target_share
        blocks, tokens = blocks + read, tokens + read * length
        flops += read * length * flops_per_token(model, length, share)
    return blocks, tokens, flops


def states(
    count: int, stage: int, world_size: int, settings: Mapping[str, Any], moments: float = 2.0
) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients, optimizer state and bucket on one rank.

    Without offload. Rajbhandari et al. 2020, section 3.1 and figure 1: wP for weights, wP for
    gradients, and 12 P for the fp32 weights with two moments (Muon has one for its matrices, which
    `moments`, a mean over the parameters, says; a plan leaves that out). Stage 1 partitions the
    optimizer state, stage 2 the gradients too, stage 3 everything. At stage 0 the weights
    themselves are fp32, which leaves 8 P; from stage 1 on DeepSpeed keeps an fp32 copy even of fp32
    weights, and gradients are accumulated in `grad_accum_dtype`; at stage 1 these sums stay between
    updates. Stages 2 and 3 allocate their bucket at once, however small the model; at a
    stage that is not the settings' own it is that of ds_configs.
    """
    width, part = weight_bytes(settings), math.ceil(count / world_size)
    weights = width * (count if stage < 3 else part)
    summed = settings.get("data_types", {}).get("grad_accum_dtype")
    gradient_width = 4 if summed == "fp32" and stage else width
    gradients = gradient_width * (count if stage < 2 else part)
    zero = settings.get("zero_optimization", {})
    own = stage == deepspeed_settings.stage_of(settings)
    default = DEEPSPEED_BUCKET if own else DS_CONFIGS_BUCKET
    bucket = int(zero.get("reduce_bucket_size", default)) if stage > 1 else 0
    bucket *= 4 if settings.get("communication_data_type") == "fp32" else width
    optimizer = int(4 * moments * count if stage == 0 else (4 + 4 * moments) * part)
    return weights, gradients, optimizer, bucket


def least_states(config: RunConfig, model: ModelConfig, world_size: int) -> tuple[int, int, int]:
    """Return lower bounds of what a run needs, without importing torch.

    Counts `ModelConfig.least_weights` only, and no activations.

    Returns:
        The number of parameters, and the bytes of a rank's weights, gradients and optimizer state
        on its device and, where they are offloaded, in host memory.
    """
    count = model.least_weights
    settings = deepspeed_settings.read_settings(*config.deepspeed_arguments(world_size))
    stage = deepspeed_settings.stage_of(settings)
    moments = 1.0 if config.optimizer.name == "muon" else 2.0
    weights, gradients, optimizer, _ = states(count, stage, world_size, settings, moments)
    device, host = weights + gradients + optimizer, 0
    if deepspeed_settings.offloads(settings, "offload_param"):
        device, host = device - weights, weights
    if deepspeed_settings.offloads(settings, "offload_optimizer"):
        # Offloaded with the optimizer's state, gradients pass through the GPU one by one.
        device, host = device - gradients - optimizer, host + optimizer
    return count, device, host


def bias_bytes(
    model: ModelConfig, rows: int, length: int, width: int, packed: bool
) -> tuple[int, int]:
    """Return the bytes of the dense back end's attention bias: kept, and at most while it is built.

    With ALiBi it has the size of all scores, [B, H, T, T], because every row has its own padding.
    It is built from a table [1, H, T, T] that is cast from fp32 (model/attention.py). Causal models
    need no mask of padding, so that rows share what they have. With latents the first and the last
    layer have biases of their own, [H, L, T] and [H, T, L] (model/perceiver.py).

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
    if model.latents:
        latents = min(model.latents, length)
        plain = dataclasses.replace(model, latents=0)
        kept, peak = bias_bytes(plain, rows, latents, width, packed)
        heads = model.num_heads if model.method.score_bias else 1
        cross = heads * latents * length
        # The scores in fp32, and then what they are cast to, or that with its mask.
        return kept + 2 * width * cross, max(peak, kept + width * cross + (4 + width) * cross)
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
    compiled: bool = False,
) -> int:
    """Return the bytes that the forward pass of a micro-batch saves for the backward pass.

    After Korthikanti et al. 2022, section 4.1, for fused attention, which saves no scores, and
    post-norm layers. Each layer saves w (8 D + 2 F) per token (its input; query, key and value; the
    attention output; input and output of the first norm; two feed-forward tensors, with a gate
    four; input of the second norm) and one byte per element under dropout. After its attention the
    last layer saves masked tokens only. The logits take 12 bytes: they exist three times in fp32,
    and in half precision twice in that and twice in fp32 (the loss and its gradient). Compiled with
    their loss they exist once, and their gradient takes their place. Latents count as tokens; where
    there are fewer, less is saved.

    Args:
        model: the architecture.
        rows: B, rows per micro-batch.
        length: T, tokens per row.
        masked: share of tokens that are predicted.
        width: w, bytes per number.
        checkpointing: whether each layer saves its input only and is recomputed, one at a time.
        bias: result of `bias_bytes`. The bias is built before the first layer, when only the
            layer's input is saved, and is read by all layers.
        compiled: whether the loss is compiled together with the head.
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
    logits = predicted * model.vocab_size * (width if compiled else 12)
    bias_kept, bias_peak = bias
    return max(saved + logits + bias_kept, tokens * width * hidden + bias_peak)


def checkpoint_bytes(count: int, width: int, stage: int) -> int:
    """Return the bytes of a checkpoint of all ranks: 12 P (see `states`), and wP at stage 1 and 2.

    At stages 0 and 3 the weights are stored once, in fp32.
    """
    return 12 * count if stage in (0, 3) else (12 + width) * count
