"""Multi-head self-attention, and the float bias of its `dense` back end, for any device."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .biases import ScoreFunction
from .config import ModelConfig
from .flex import FlexBias, flex_attend
from .masks import visible_keys
from .positions import Rotation
from .tiled_attention import tiled_attention

AttentionBias = Tensor | tuple[Tensor, ...] | FlexBias | None
"""What is added to the scores: a tensor that broadcasts to [B, H, T, T]; several, to be added tile
by tile; or functions that FlexAttention compiles. None where nothing is added."""


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """What attention needs besides its input. Made once per batch, read by every layer."""

    bias: AttentionBias = None
    rotation: Rotation | None = None
    """Applied to queries and keys; None where positions do not act on them."""
    weights: list[Tensor] | None = None
    """Where each layer appends its attention weights, [B, H, T, T], before dropout. None where they
    are not wanted: no fused kernel returns them. The bias must be one tensor, or None, and
    `is_causal` False."""
    is_causal: bool = False
    """Queries see no later keys, and the bias, which is None, does not say so."""
    local_bias: AttentionBias = None
    """The bias of layers with a window; None where the model has none."""

    def of_layers(self, windows: Sequence[int]) -> list["AttentionContext"]:
        """Return the context of each layer, given its window, 0 for none."""
        local = dataclasses.replace(self, bias=self.local_bias, is_causal=False)
        return [local if window else self for window in windows]


class StackedLinear(nn.Linear):
    """Linear layers of one input, their matrices above each other: one product computes them."""

    def __init__(self, size: int, output_size: int, matrices: int, *, bias: bool) -> None:
        """Make `matrices` layers from `size` to `output_size` each."""
        super().__init__(size, matrices * output_size, bias=bias)
        self.matrices = matrices


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(K) + bias) v, with query, key and value in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        """Make the projections of hidden size D to 3 D and back."""
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout
        hidden, bias = config.hidden_size, config.biases
        self.query_key_value = StackedLinear(hidden, hidden, 3, bias=bias)
        self.output = nn.Linear(hidden, hidden, bias=bias)

    def forward(
        self, x: Tensor, context: AttentionContext, target_positions: Tensor | None = None
    ) -> Tensor:
        """Attend from every token to the keys that it sees.

        Args:
            x: [B, T, D].
            context: of the batch.
            target_positions: [M] or None; only these tokens go through the output projection.

        Returns:
            [B, T, D], or [M, D] for the target positions.
        """
        batch, length, hidden = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.num_heads, -1)
        mixed = attend(qkv, context, self.dropout if self.training else 0.0)
        return self.output(at_targets(mixed.reshape(batch, length, hidden), target_positions))


def attend(qkv: Tensor, context: AttentionContext, dropout: float) -> Tensor:
    """Compute attention by the fastest available way, [B, T, 3, H, K] to [B, T, H, K]."""
    bias = context.bias
    query, key, value = qkv.unbind(2)
    if context.rotation is not None:
        query, key = context.rotation(query), context.rotation(key)
    if isinstance(bias, tuple):
        is_turned = context.rotation is not None
        parts = torch.stack([query, key, value], dim=2) if is_turned else qkv
        return tiled_attention(parts, bias, dropout)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # each [B, H, T, K]
    if isinstance(bias, FlexBias):
        return flex_attend(query, key, value, bias).transpose(1, 2)
    if context.weights is not None:
        scores: Tensor = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        context.weights.append(weights)
        return (F.dropout(weights, dropout) @ value).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, is_causal=context.is_causal
    )
    return mixed.transpose(1, 2)


def at_targets(x: Tensor, target_positions: Tensor | None) -> Tensor:
    """Select `target_positions` of the flattened batch: [B, T, D] to [M, D]. None selects all."""
    return x if target_positions is None else x.flatten(0, 1).index_select(0, target_positions)


def dense_bias(
    scores: ScoreFunction | None,
    document_ids: Tensor | None,
    num_heads: int,
    x: Tensor,
    in_parts: bool = False,
    causal: bool = False,
    window: int = 0,
    keys: int | None = None,
) -> Tensor | tuple[Tensor, ...] | None:
    """Evaluate the position bias and the mask at all indices: the additive bias of all layers.

    torch's fused kernels take one tensor. Where the position bias differs by head and the mask by
    row, it has the size of all scores, [B, H, T, T]; nothing else of that size is made. On a CPU
    a mask that hides nothing is omitted; other devices would have to synchronise.

    Args:
        scores: the position bias, computed in fp32 and then cast.
        document_ids: [B, T] or None, see the package's docstring.
        num_heads: H.
        x: [B, T, D], whose dtype and device the bias gets.
        in_parts: return the position bias and the mask separately, to be added tile by tile; except
            for a trained position bias, because tiles give it no gradient.
        causal: whether a query sees no later keys.
        window: tokens that a query sees around itself; 0: all.
        keys: S, the number of keys; None: T, as of queries.

    Returns:
        [1, H, T, T], [B, 1, 1, T], [B, 1, T, T] or [B, H, T, T], where B is 1 if the mask is the
        same for all rows, or None where nothing is added; in parts, at most one of the first and
        one of the second or third kind. With `keys`, the last T is S.
    """
    # ONNX looks up by 64-bit indices only.
    kind = torch.int64 if torch.compiler.is_exporting() else torch.int32

    def indices(count: int) -> Tensor:
        return torch.arange(count, dtype=kind, device=x.device)

    batch, length, _ = x.shape
    row, head = indices(batch)[:, None, None, None], indices(num_heads)[:, None, None]
    query, key = indices(length)[:, None], indices(length if keys is None else keys)
    bias = None if scores is None else scores(head, query, key).to(x.dtype)[None]
    rule = visible_keys(document_ids, causal, window)
    visible = None if rule is None else rule(row, head, query, key)
    if visible is not None and visible.ndim == 2:  # the same for all rows
        visible = visible[None, None]
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    if in_parts and not (bias is not None and bias.requires_grad):
        mask = None if visible is None else masked(zero, visible)
        return tuple(part for part in (bias, mask) if part is not None)
    if visible is None or (bias is not None and _known_to_be_all(visible)):
        return bias
    return masked(zero if bias is None else bias, visible)


def _known_to_be_all(visible: Tensor) -> bool:
    may_look = visible.device.type == "cpu" and not torch.compiler.is_compiling()
    return may_look and bool(visible.all())


def masked(bias: Tensor, visible: Tensor) -> Tensor:
    """Replace the bias of hidden keys by half of the lowest number.

    Not by -inf: the weight of a hidden key is zero all the same, and a query that sees no key still
    has a softmax. Not by the lowest number, which becomes -inf in kernels that compute exp(x) as
    2^(x log2(e)): such a query then attended to nothing (measured on an H100).
    """
    return torch.where(visible, bias, torch.finfo(bias.dtype).min / 2)
