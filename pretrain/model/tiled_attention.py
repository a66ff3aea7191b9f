"""Attention with dropout on a CPU, one tile of scores at a time.

torch's fused CPU kernels have no dropout, and its unfused path reads all [B, H, T, T] scores from
main memory about ten times. Here a tile goes through every operation while it is in the processor's
cache, and dropout is drawn for four scores at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_TILE = 2**18  # scores: 1 MB in fp32


def tiled_attention(query_key_value: Tensor, biases: tuple[Tensor, ...], dropout: float) -> Tensor:
    """softmax(q k^T / sqrt(K) + biases) v, with dropout on the weights.

    The dropout probability is rounded to a multiple of 2^-16, and the kept weights are scaled to
    match, so that the expectation is exact. Draws from torch's global generator. The gradient is
    FlashAttention's (Dao et al. 2022, appendix B.4), but the weights are kept, not recomputed.

    Args:
        query_key_value: [B, T, 3, H, K], fp32 or fp64.
        biases: each broadcasts to [B, H, T, T] and gets no gradient. They are added tile by tile,
            so that their sum never exists as a whole.
        dropout: probability, below 1.

    Returns:
        [B, T, H, K]
    """
    batch, length, _, heads, _ = query_key_value.shape
    biases = tuple(bias.expand(batch, heads, length, length) for bias in biases)
    apply: Callable[..., Tensor] = _Attend.apply
    return apply(query_key_value, biases, min(round(dropout * 2**16), 2**16 - 1))


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
            row = tile[:2]
            weights = torch.matmul(query[tile], key[row].mT, out=signed[tile])
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
            row = tile[:2]
            kept = signed[tile].clamp(min=0)
            of_value[row] += kept.mT @ gradient[tile]
            of_scores = (gradient[tile] @ value[row].mT).mul_(kept)
            weights = torch.abs(signed[tile], out=kept)
            of_scores.addcmul_(weights, sums[tile], value=-1)
            of_query[tile] = of_scores @ key[row]
            of_key[row] += of_scores.mT @ query[tile]
        result[:, :, :2] *= size**-0.5
        return result, None, None


def _tiles(batch: int, heads: int, length: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the rows of the batch, the heads and the queries of each tile.

    A tile covers several rows, several heads of one row, or part of one head. It always has all
    keys, for the softmax.
    """
    tile_rows = max(1, _TILE // (heads * length**2))
    tile_heads = max(1, min(heads, _TILE // length**2))
    tile_queries = max(1, min(length, _TILE // length))
    for row in range(0, batch, tile_rows):
        for head in range(0, heads, tile_heads):
            for query in range(0, length, tile_queries):
                yield (
                    slice(row, row + tile_rows),
                    slice(head, head + tile_heads),
                    slice(query, query + tile_queries),
                )


def _noise(like: Tensor, dropped: int) -> Tensor:
    """Draw numbers like `like` that are negative with probability dropped / 2^16, and never zero.

    Each 64-bit draw of the generator gives four numbers.
    """
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    bits = words.view(torch.int16)[: like.numel()].view(like.shape)
    return bits.to(like.dtype).add_(2**15 - dropped + 0.5)
