"""Repartition ZeRO's weights and optimizer state for another number of ranks. No deepspeed.

For each parameter group, each rank saves one flat vector of its fp32 weights and one of each of
the optimizer's moments. ZeRO 1 and 2 concatenate the parameters of a group and partition the
result; ZeRO 3 partitions each parameter and concatenates the pieces of a rank. `repartition` does
both, with different lists of partitioned tensors. Nothing is rounded: the new partitions hold the
same bits.

DeepSpeed's "universal checkpoint" writes every tensor to disk once more. At stage 3 it also gives
all groups the weight decay of the first one, and one step counter that each group advances.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.engine.by_parameter import Piece, pieces_within

State = dict[str, Any]


_STAGES_1_AND_2 = ("single_partition_of_fp32_groups", "base_optimizer_state")
KEYS = {1: _STAGES_1_AND_2, 2: _STAGES_1_AND_2, 3: ("fp32_flat_groups", "optimizer_state_dict")}
"""Keys of the fp32 weights and of the wrapped optimizer in a saved state, for each ZeRO stage."""


def repartition(
    saved: Callable[[int], Any],
    keys: Sequence[Any],
    tensors: Sequence[tuple[int, int, int]],
    rank: int,
) -> Tensor:
    """Compute the vector of one new rank from those of the old ranks.

    Args:
        saved: reads what an old rank saved. It is called for rank 0, and for those that hold
            elements of the new vector: a few of a thousand.
        keys: of the old rank's vector in it, which concatenates one piece of every tensor.
        tensors: of each, in the same order: its number of elements, and the length of its pieces
            on the old and on the new ranks. The last pieces may be shorter, or padded.
        rank: the new rank.

    Returns:
        The rank's piece of every tensor, concatenated, with zeros beyond the end of a tensor.
    """

    def part(other: int) -> Tensor:
        found: Tensor = functools.reduce(operator.getitem, keys, saved(other))
        return found

    pieces = []
    begin = 0
    for length, old, new in tensors:
        first, last = (min(end, length) for end in (rank * new, (rank + 1) * new))
        for other in range(first // old, -(-last // old)):
            own = slice(max(first - other * old, 0), min(last - other * old, old))
            pieces.append(part(other)[begin : begin + old][own])
        pieces.append(part(0).new_zeros(new - (last - first)))
        begin += old
    return torch.cat(pieces)


def state_for_rank(
    saved: Callable[[int], State],
    saved_world_size: int,
    partitions: Sequence[tuple[Tensor, Sequence[tuple[int, ...]]]],
    rank: int,
    world_size: int,
) -> State:
    """Compute the state that a rank would have saved with another world size.

    Args:
        saved: reads the state that the ZeRO optimizer of an old rank saved. It is called for rank 0
            and for the few whose elements the rank gets.
        saved_world_size: the old number of ranks.
        partitions: for each parameter group, the vector of the new rank and the parameters' shapes.
        rank: the new rank.
        world_size: the new number of ranks.

    Raises:
        ValueError: the number of parameter groups differs from the saved one.
    """
    like = saved(0)
    stage = int(like["zero_stage"])
    weights, wrapped = KEYS[stage]
    if len(like[weights]) != len(partitions):
        raise ValueError(
            f"the optimizer state has {len(like[weights])} parameter groups, the optimizer of "
            f"the model has {len(partitions)}"
        )
    flat, moments = [], {}
    for group, (vector, shapes) in enumerate(partitions):
        lengths = [math.prod(shape) for shape in shapes]
        tensors = [(sum(lengths), len(like[weights][group]), len(vector))]
        if stage == 3:
            tensors = [(n, -(-n // saved_world_size), -(-n // world_size)) for n in lengths]
        flat.append(repartition(saved, (weights, group), tensors, rank))
        moments[group] = {
            # AdamW's number of updates is a scalar.
            key: repartition(saved, (wrapped, "state", group, key), tensors, rank)
            if value.ndim
            else value.clone()
            for key, value in like[wrapped]["state"].get(group, {}).items()  # {}: no update yet
        }
    return {**like, weights: flat, wrapped: {**like[wrapped], "state": moments}}


def pieces(
    stage: int, shapes: Sequence[tuple[int, ...]], size: int, rank: int, world_size: int
) -> list[Piece]:
    """Compute which pieces of parameters a rank's vector holds; the rest of it is padding.

    Args:
        stage: of ZeRO, 1 to 3.
        shapes: of each parameter.
        size: length of the vector.
        rank: the rank.
        world_size: number of ranks.

    Returns:
        The piece of each parameter.
    """
    if stage == 3:
        counts = [-(-math.prod(shape) // world_size) for shape in shapes]
        places = itertools.accumulate(counts, initial=0)
        parts = zip(shapes, counts, places, strict=False)
        return [pieces_within([s], rank * n, (rank + 1) * n, place)[0] for s, n, place in parts]
    return pieces_within(shapes, rank * size, (rank + 1) * size)
