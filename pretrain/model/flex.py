"""The `flex` backend: FlexAttention with ALiBi as a score_mod and texts as a block mask.

No [T, T] tensor is made: blocks of 128 x 128 scores that nothing sees are left out, and the bias is
computed from the indices. Compiled on CUDA. On a CPU torch has the forward pass alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .positions import alibi_slopes

if TYPE_CHECKING:
    from .config import ModelConfig

BLOCK = 128
"""Lengths are padded to a multiple: below it, gradients are known to be NaN where there is a
score_mod beside a block mask (pytorch issue 153799)."""

KERNELS = {"flex": "AUTO", "flex-flash": "FLASH"}
"""The BACKEND of FlexAttention's kernel options that each of our names stands for."""

Index = Tensor
ScoreMod = Callable[[Tensor, Index, Index, Index, Index], Tensor]
MaskMod = Callable[[Index, Index, Index, Index], Tensor]


@dataclasses.dataclass(frozen=True)
class FlexBias:
    """What `attention_bias` is to `dense`: made once a batch, read by every layer."""

    score_mod: ScoreMod | None
    block_mask: BlockMask | None
    backend: str


# A model that is compiled whole takes it as an input, as in torch's own examples: made inside, the
# CPU's compiler finds no kernel for it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def flex_bias(
    config: ModelConfig,
    document_ids: Tensor | None,
    device: torch.device,
    name: str,
) -> FlexBias | None:
    """The same bias as `attention_bias` makes, up to a constant for each query.

    Args:
        config: which positions the model has.
        document_ids: [B, T], see `attention_bias`.
        device: of the scores.
        name: a key of KERNELS.

    Returns:
        None where nothing is to be added: torch's own kernels are faster there.
    """
    alibi = config.position == "alibi"
    if document_ids is None and not alibi:
        return None
    score_mod = _alibi(config.num_heads, config.alibi, device) if alibi else None
    block_mask = None if document_ids is None else _block_mask(document_ids)
    return FlexBias(score_mod, block_mask, KERNELS[name])


def fused_attention(query: Tensor, key: Tensor, value: Tensor, bias: FlexBias) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v, all [B, H, T, K]; zeros where a query sees nothing."""
    options = {"BACKEND": bias.backend}
    inside: Callable[..., Any] = flex_attention
    kernel = inside if torch.compiler.is_compiling() else _kernel()
    mixed: Tensor = kernel(
        query,
        key,
        value,
        score_mod=bias.score_mod,
        block_mask=bias.block_mask,
        kernel_options=options,
    )
    return mixed


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _alibi(num_heads: int, kind: str, device: torch.device) -> ScoreMod:
    """ALiBi in one term, in fp32.

    With offset, -m |j - i| + m/2 [j > i] = m/4 - m |j - i - 1/4| for whole i and j, and m/4 is the
    same for all keys of a query, which the softmax does not see.
    """
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)
    ahead = 0.25 if kind == "offset" else 0.0

    def score_mod(score: Tensor, batch: Index, head: Index, query: Index, key: Index) -> Tensor:
        return score - slopes[head] * (key - query - ahead).abs()

    return score_mod


def _block_mask(document_ids: Tensor) -> BlockMask:
    """Which scores count, from [B, T] alone: the way through [B, T, T] takes much longer.

    Whole numbers: blocks whose ranges of numbers are apart share no text; where one number fills
    both, nothing is hidden. Both hold whatever the order, and where texts follow each other no
    block is kept without need.
    """
    batch, length = document_ids.shape
    blocks = document_ids.view(batch, length // BLOCK, BLOCK)
    if document_ids.dtype == torch.bool:
        some, whole = blocks.any(-1)[:, None, :], blocks.all(-1)[:, None, :]

        def mask_mod(batch: Index, head: Index, query: Index, key: Index) -> Tensor:
            return document_ids[batch, key]

    else:
        # Padding, 0, follows the last text: as a number above all, it keeps the order.
        order = document_ids.masked_fill(document_ids == 0, length + 1)
        least, most = order.view(blocks.shape).aminmax(dim=-1)
        some = (least[:, :, None] <= most[:, None, :]) & (least[:, None, :] <= most[:, :, None])
        whole = (least[:, :, None] == most[:, None, :]) & (least[:, None, :] == most[:, :, None])

        def mask_mod(batch: Index, head: Index, query: Index, key: Index) -> Tensor:
            return document_ids[batch, query] == document_ids[batch, key]

    some, whole = (x.expand(batch, blocks.shape[1], blocks.shape[1]) for x in (some, whole))
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~whole), *_ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=mask_mod
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, Q, K] bool to how many blocks each row has, [B, 1, Q], and which come first."""
    blocks = blocks[:, None].to(torch.int32)
    order = torch.argsort(blocks, dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
