"""Attention with dropout for a CPU, a tile of scores at a time.

torch's fused kernels for a CPU know no dropout, and its unfused path walks over all [B, H, T, T]
scores about ten times, through main memory. Here a tile goes through every operation while it is in
the processor's cache, and the dropout is drawn four numbers at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_TILE = 2**18  # scores: 1 MB in fp32


def tiled_attention(query_key_value: Tensor, biases: tuple[Tensor, ...], dropout: float) -> Tensor:
    """softmax(q k^T / sqrt(K) + biases) v, each weight dropped with a probability.

    The probability is rounded to a multiple of 2^-16, and what is kept scaled to match, so that the
    expectation is exact. Draws from torch's global generator. The gradient is FlashAttention's
    (Dao et al. 2022, appendix B.4), with the weights kept, not computed again.

    Args:
        query_key_value: [B, T, 3, H, K], fp32 or fp64.
        biases: each broadcasts to [B, H, T, T] and gets no gradient; they are added tile by tile,
            so that their sum never exists as a whole.
        dropout: the probability, below 1.

    Returns:
        [B, T, H, K]
    """
    batch, length, _, heads, _ = query_key_value.shape
    biases = tuple(bias.expand(batch, heads, length, length) for bias in biases)
    apply: Callable[..., Tensor] = _Attend.apply
    return apply(query_key_value, biases, round(dropout * 2**16))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        qkv: Tensor,
        biases: tuple[Tensor, ...],
        dropped: int,
    ) -> Tensor:
        batch, length, _, heads, size = qkv.shape
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, K]
        signed = qkv.new_empty(batch, heads, length, length)  # weights, negative where dropped
        mixed = torch.empty_like(query)
        for tile in _tiles(batch, heads, length):
            row = tile[0], tile[1]
            weights = torch.bmm(query[tile], key[row].transpose(1, 2), out=signed[tile])
            weights.mul_(size**-0.5)
            for bias in biases:
                weights.add_(bias[tile])
            torch.softmax(weights, -1, out=weights)
            if dropped:
                noise = _noise(weights, dropped)
                weights = torch.clamp(weights.copysign_(noise), min=0, out=noise)
            mixed[tile] = weights @ value[row]
        mixed = mixed.mul_(1 / (1 - dropped / 2**16)).transpose(1, 2).contiguous()
        ctx.save_for_backward(qkv, signed, mixed)
        ctx.dropped = dropped
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        qkv, signed, mixed = ctx.saved_tensors
        batch, length, _, heads, size = qkv.shape
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        # For each query, the sum over its weights of weight x gradient.
        sums = (gradient * mixed).sum(-1).transpose(1, 2)[..., None]  # [B, H, T, 1]
        gradient = (gradient / (1 - ctx.dropped / 2**16)).transpose(1, 2)
        result = torch.zeros_like(qkv)
        of_query, of_key, of_value = result.permute(2, 0, 3, 1, 4)
        for tile in _tiles(batch, heads, length):
            row = tile[0], tile[1]
            kept = signed[tile].clamp(min=0)
            of_value[row] += kept.transpose(1, 2) @ gradient[tile]
            of_scores = (gradient[tile] @ value[row].transpose(1, 2)).mul_(kept)
            weights = torch.abs(signed[tile], out=kept)
            of_scores.addcmul_(weights, sums[tile], value=-1)
            of_query[tile] = of_scores @ key[row]
            of_key[row] += of_scores.transpose(1, 2) @ query[tile]
        result[:, :, :2] *= size**-0.5
        return result, None, None


def _tiles(batch: int, heads: int, length: int) -> Iterator[tuple[int, slice, slice]]:
    """Row of the batch, heads and queries of each tile: all queries of some heads, or of one some.

    Keys are never cut, so that a softmax is whole.
    """
    some_heads = max(1, _TILE // length**2)
    some_queries = max(1, min(length, _TILE // length))
    for row in range(batch):
        for head in range(0, heads, some_heads):
            for query in range(0, length, some_queries):
                yield row, slice(head, head + some_heads), slice(query, query + some_queries)


def _noise(like: Tensor, dropped: int) -> Tensor:
    """Numbers of the shape of `like`, negative with probability dropped / 2^16, never zero.

    The generator's 64 bits serve four of them.
    """
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = words.view(torch.int16)[: like.numel()].view(like.shape)
    return bits.to(like.dtype).add_(2**15 - dropped + 0.5)
