"""ZeRO's parts of weights and optimiser state, cut anew for another number of ranks. No deepspeed.

Each rank saves one flat vector for each parameter group: of its weights in fp32, and of each of
Adam's moments. ZeRO 1 and 2 lay a group's parameters end to end and cut the whole; ZeRO 3 cuts each
parameter and lays a rank's pieces end to end. Both are `recut` with their own list of what is cut.
Nothing is rounded, so that the new parts hold the same bits.

DeepSpeed's own way, its "universal checkpoint", writes every tensor to disk once more, and at stage
3 gives all groups the first group's weight decay and one step counter that each of them advances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = dict[str, Any]


class Keys(NamedTuple):
    """Where a stage keeps things in what its optimiser saves."""

    weights: str
    adam: str


KEYS = {
    1: Keys("single_partition_of_fp32_groups", "base_optimizer_state"),
    2: Keys("single_partition_of_fp32_groups", "base_optimizer_state"),
    3: Keys("fp32_flat_groups", "optimizer_state_dict"),
}


class Cut(NamedTuple):
    """How a tensor is cut: the numbers that are in it, and those of a rank's piece, old and new.

    The last pieces may be shorter, or hold zeros beyond the tensor's end.
    """

    length: int
    old: int
    new: int


def recut(parts: Sequence[Tensor], cuts: Sequence[Cut], rank: int) -> Tensor:
    """One rank's new part of a group.

    Args:
        parts: the old ranks' parts, in order, each with one piece of every tensor end to end.
        cuts: one for each of the tensors.
        rank: the new rank.

    Returns:
        Its piece of every tensor end to end, with zeros beyond a tensor's end.
    """
    pieces = []
    begin = 0
    for length, old, new in cuts:
        whole = torch.cat([part[begin : begin + old] for part in parts])[:length]
        mine = whole[rank * new : (rank + 1) * new]
        pieces.append(torch.nn.functional.pad(mine, (0, new - len(mine))))
        begin += old
    return torch.cat(pieces)


def state_for_rank(
    saved: Sequence[State],
    lengths: Sequence[Sequence[int]],
    sizes: Sequence[int],
    rank: int,
    world_size: int,
) -> State:
    """What a rank would have saved, had there been `world_size` of them.

    Args:
        saved: what each old rank's ZeRO optimiser saved, in order.
        lengths: for each parameter group, the length of each of its parameters.
        sizes: for each parameter group, the length of a new rank's part.
        rank: the new rank.
        world_size: how many there are now.

    Raises:
        ValueError: the parameter groups are not those that were saved.
    """
    stage = int(saved[0]["zero_stage"])
    weights, adam = KEYS[stage]
    if len(saved[0][weights]) != len(lengths):
        raise ValueError(
            f"the optimiser state has {len(saved[0][weights])} parameter groups, the model's "
            f"optimiser has {len(lengths)}"
        )
    flat, moments = [], {}
    for group, (numbers, size) in enumerate(zip(lengths, sizes, strict=True)):
        parts = [part[weights][group] for part in saved]
        if stage == 3:
            cuts = [Cut(n, -(-n // len(saved)), -(-n // world_size)) for n in numbers]
        else:
            cuts = [Cut(sum(numbers), len(parts[0]), size)]
        flat.append(recut(parts, cuts, rank))
        states = [part[adam]["state"][group] for part in saved]
        moments[group] = {
            "step": states[0]["step"].clone(),
            **{k: recut([s[k] for s in states], cuts, rank) for k in ("exp_avg", "exp_avg_sq")},
        }
    return {**saved[0], weights: flat, adam: {**saved[0][adam], "state": moments}}
