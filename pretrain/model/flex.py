"""The `flex` back end: FlexAttention with the position bias as score_mod and a block mask.

No [T, T] tensor is made: the bias is computed from the indices, and tiles of 128 x 128 scores that
nothing sees are skipped. Compiled on CUDA. On a CPU torch offers the forward pass only.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .biases import ScoreFunction
from .masks import MaskFunction, depends_on_documents, visible_keys

TILE = 128
"""Lengths are padded to a multiple. With shorter tiles, gradients are known to be NaN where there
is a score_mod beside a block mask (pytorch issue 153799); and on Hopper torch 2.13 compiles no
backward pass of heads of 64 to 128 with tiles of 64 keys, whatever the options below: it compares
them with its own option, 128."""

_OPTIONS = {
    (9, False): {
        "fwd_BLOCK_M": 128,
        "fwd_BLOCK_N": 64,
        "fwd_num_warps": 4,
        "fwd_num_stages": 3,
        **dict.fromkeys(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 64),
        "bwd_num_warps": 4,
        "bwd_num_stages": 3,
    },
    (9, True): {"fwd_num_warps": 8, "fwd_num_stages": 2},
    (8, True): {"bwd_num_warps": 8},
}
"""Options of the kernels in bf16 and fp16, by GPU generation and whether heads are larger than 64.
Hopper (9): the first were the fastest of those tried on an H100 for a layer with ALiBi and
documents (2.1 ms, torch's 2.3); heads of 128 spill registers with them, and with torch's choice of
four warps. Ampere (8): with four warps the backward pass spills 400 bytes a thread, with eight none
(compiled for an A100, not measured)."""


@dataclasses.dataclass(frozen=True)
class FlexBias:
    """Arguments of FlexAttention that are the same for every layer."""

    score_mod: Callable[..., Tensor] | None
    block_mask: BlockMask | None


# A model that is compiled as a whole takes the result as an input, as in torch's own examples: if
# it is made inside, the CPU's compiler finds no kernel for it. torch.compiler.disable would import
# the compiler here, which takes two seconds; this does so when the function is first called.
@torch._disable_dynamo  # type: ignore[attr-defined]
def flex_bias(
    scores: ScoreFunction | None,
    document_ids: Tensor | None,
    length: int,
    causal: bool = False,
    window: int = 0,
    device: torch.device | None = None,
) -> FlexBias | None:
    """Prepare the same bias and mask that `dense` has.

    Args:
        scores: the position method's bias, on the device of the scores.
        document_ids: [B, T] or None, see the package's docstring.
        length: T, a multiple of TILE.
        causal: whether a query sees no later keys.
        window: tokens that a query sees around itself; 0: all.
        device: of the scores, for a mask that does not depend on the ids.

    Returns:
        None where nothing is added: torch's own kernels are faster then.
    """
    rule = visible_keys(document_ids, causal, window)
    if rule is None and scores is None:
        return None

    def score_mod(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert scores is not None
        return score + scores(head, query, key)

    block_mask = None
    if rule is not None:
        ids = document_ids if depends_on_documents(document_ids, causal) else None
        block_mask = _block_mask(rule, ids, length // TILE, causal, window, device)
    return FlexBias(score_mod if scores else None, block_mask)


def flex_attend(query: Tensor, key: Tensor, value: Tensor, bias: FlexBias) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v, all [B, H, T, K]; zeros where a query sees nothing."""
    inside: Callable[..., Any] = flex_attention
    kernel = inside if torch.compiler.is_compiling() else _kernel()
    return kernel(
        query,
        key,
        value,
        score_mod=bias.score_mod,
        block_mask=bias.block_mask,
        kernel_options=_options(query),
    )


@functools.cache
def _kernel() -> Callable[..., Any]:
    check_no_fallback()
    return torch.compile(flex_attention, dynamic=False)


def check_no_fallback() -> None:
    """Make torch raise an error after too many recompilations, instead of giving up compiling.

    The uncompiled FlexAttention makes all [B, H, T, T] scores. Torch's own limit of 8 suffices for
    one length: the last layer and the others, in training and evaluation, with padding and without.
    """
    import torch._dynamo

    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = 64


def _options(query: Tensor) -> dict[str, int] | None:
    if not query.is_cuda or query.dtype == torch.float32:
        return None
    generation, _ = torch.cuda.get_device_capability(query.device)
    return _OPTIONS.get((generation, query.shape[-1] > 64))


def _block_mask(
    rule: MaskFunction,
    document_ids: Tensor | None,
    tiles: int,
    causal: bool,
    window: int,
    device: torch.device | None,
) -> BlockMask:
    """Compute which tiles have visible scores, without evaluating the rule everywhere.

    Args:
        rule: the mask.
        document_ids: [B, T]; None where the rule does not depend on them.
        tiles: of a row.
        causal: whether a query sees no later keys.
        window: tokens that a query sees around itself; 0: all.
        device: of the mask where there are no ids.
    """
    if document_ids is None:
        some = whole = torch.ones((1, tiles, tiles), dtype=torch.bool, device=device)
    else:
        some, whole = _document_tiles(document_ids)
    tile = torch.arange(tiles, device=some.device)
    if causal:
        some, whole = some & (tile <= tile[:, None]), whole & (tile < tile[:, None])
    if window:
        apart, half = TILE * (tile - tile[:, None]).abs(), window // 2
        # The nearest and the farthest pair of two tiles.
        some, whole = some & (apart - TILE < half), whole & (apart + TILE - 1 <= half)
    # [2, 2, B, 1, Q, K]: by query and by key, with other scores and without. All are counted and
    # sorted at once: `from_kv_blocks` takes some thirty kernels more.
    kinds = torch.stack([some & ~whole, whole])[:, :, None]
    directions = torch.stack([kinds, kinds.mT]).to(torch.int32)
    counts = directions.sum(-1, dtype=torch.int32)
    order = torch.argsort(directions, dim=-1, descending=True, stable=True).to(torch.int32)
    fields: dict[str, Any] = {}
    for number, name in enumerate(("kv", "full_kv", "q", "full_q")):
        place = divmod(number, 2)
        fields |= {f"{name}_num_blocks": counts[place], f"{name}_indices": order[place]}
    lengths = (tiles * TILE, tiles * TILE)
    return BlockMask(seq_lengths=lengths, BLOCK_SIZE=(TILE, TILE), mask_mod=rule, **fields)


def _document_tiles(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a tile has visible scores, and where it has no others: bool [B, Q, K] each.

    Integer ids: tiles whose ranges of ids do not overlap are skipped, and tiles where one id fills
    both ranges need no mask. Both hold in any order of ids. Where documents follow each other in
    ascending order no tile is kept without need.
    """
    batch, length = document_ids.shape
    tiles = document_ids.view(batch, length // TILE, TILE)
    if document_ids.dtype == torch.bool:
        some, whole = tiles.any(-1)[:, None, :], tiles.all(-1)[:, None, :]
    else:
        # Padding follows the last document: as an id above all others, it keeps the order.
        order = document_ids.masked_fill(document_ids == 0, length + 1)
        least, most = order.view(tiles.shape).aminmax(dim=-1)
        some = (least[:, :, None] <= most[:, None, :]) & (least[:, None, :] <= most[:, :, None])
        whole = (least[:, :, None] == most[:, None, :]) & (least[:, None, :] == most[:, :, None])
    shape = batch, tiles.shape[1], tiles.shape[1]
    return some.expand(shape), whole.expand(shape)
