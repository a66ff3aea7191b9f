"""Multi-head self-attention, and the float bias of its `dense` backend, right on any device."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .config import ModelConfig
from .flex import FlexBias, fused_attention
from .positions import alibi_bias
from .tiled_attention import tiled_attention

AttentionBias = Tensor | tuple[Tensor, ...] | FlexBias | None
"""What the layers get: the whole bias, parts of it to add tile by tile, or how to compute it."""


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(K) + bias) v, with query, key and value in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        """Projections of hidden size D to 3D and back."""
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, bias: AttentionBias, target_positions: Tensor | None = None
    ) -> Tensor:
        """What each token gathers from those that it sees.

        Args:
            x: [B, T, D].
            bias: broadcasts to [B, H, T, T], as does each part of a tuple; or says how to compute
                it; None where nothing is to be added to the scores.
            target_positions: [M] places in the flattened [B * T] batch to project; None: all.

        Returns:
            [B, T, D], or [M, D] of the places alone.
        """
        batch, length, hidden = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.num_heads, -1)
        mixed = _attend(qkv, bias, self.dropout if self.training else 0.0)
        output: Tensor = self.output(
            at_targets(mixed.reshape(batch, length, hidden), target_positions)
        )
        return output


def _attend(qkv: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
    """[B, T, 3, H, K] to [B, T, H, K], by the fastest way there is."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, K]
    if isinstance(bias, FlexBias):
        return fused_attention(query, key, value, bias).transpose(1, 2)
    if isinstance(bias, tuple):
        return tiled_attention(qkv, bias, dropout)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    return mixed.transpose(1, 2)


def at_targets(x: Tensor, target_positions: Tensor | None) -> Tensor:
    """Select `target_positions` of the flattened batch: [B, T, D] to [M, D]. None selects all."""
    return x if target_positions is None else x.flatten(0, 1).index_select(0, target_positions)


def uses_tiles(x: Tensor, dropout: float) -> bool:
    """Whether layers that read `x` are to compute attention in tiles: with dropout, on a CPU."""
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return dropout > 0 and on_cpu and not torch.compiler.is_compiling()


def attention_bias(
    config: ModelConfig,
    length: int,
    document_ids: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Additive attention bias of every layer: ALiBi, and the lowest number at hidden keys.

    ALiBi is computed in fp32 and then cast, so that casting the module to bf16 cannot coarsen it.
    The lowest number rather than -inf: the weight of a hidden key is zero all the same, and a token
    that sees no key still has a softmax. Nothing larger than the result is made on the way.

    Args:
        config: which positions the model has.
        length: T.
        document_ids: [B, T] bool, True for real tokens, which are visible to all; or whole
            numbers, where tokens of equal number see each other. None where all are visible.
        dtype: of the scores.
        device: of the scores.

    Returns:
        [1, H, T, T], [B, 1, 1, T], [B, 1, T, T] or [B, H, T, T], contiguous enough for the fused
        kernels; None where nothing is to be added.
    """
    alibi = _alibi(config, length, dtype, device)
    if document_ids is None:
        return alibi
    at_visible = torch.zeros((), dtype=dtype, device=device) if alibi is None else alibi
    return torch.where(_visible(document_ids), at_visible, torch.finfo(dtype).min)


def bias_parts(
    config: ModelConfig, length: int, document_ids: Tensor | None, x: Tensor
) -> tuple[Tensor, ...]:
    """What `attention_bias` returns, for scores like `x`, as tensors whose sum it is.

    At most [1, H, T, T] and [B, 1, T, T]: no part has the size of all scores.
    """
    alibi = _alibi(config, length, x.dtype, x.device)
    without_alibi = dataclasses.replace(config, position="none")
    hidden = attention_bias(without_alibi, length, document_ids, x.dtype, x.device)
    return tuple(part for part in (alibi, hidden) if part is not None)


def _alibi(
    config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """[1, H, T, T]; None in a model that has other positions."""
    if config.position != "alibi":
        return None
    return alibi_bias(config.num_heads, length, config.alibi, device)[None].to(dtype)


def _visible(document_ids: Tensor) -> Tensor:
    """Whether each query sees each key: [B, 1, 1, T] or [B, 1, T, T] bool."""
    if document_ids.dtype == torch.bool:
        return document_ids[:, None, None, :]
    return (document_ids[:, :, None] == document_ids[:, None, :])[:, None]
