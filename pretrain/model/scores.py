"""Position biases of attention scores, as functions of indices."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

ScoreFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Index tensors of heads, queries and keys to the bias of the scores, in fp32.

Written once for all back ends: `dense` evaluates it on a grid, FlexAttention compiles it."""


def constant(numbers: tuple[float, ...] | tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor, which stays on its device: fp32, or int64 of whole numbers.

    A copy in every batch would make the host wait for the device. Not a buffer: casting the module
    to bf16 would round it.
    """
    make = _made if torch.compiler.is_compiling() else _kept
    return make(numbers, device)


def _made(numbers: tuple[float, ...] | tuple[int, ...], device: torch.device) -> Tensor:
    dtype = torch.float32 if isinstance(numbers[0], float) else torch.int64
    return torch.tensor(numbers, dtype=dtype, device=device)


@functools.cache
def _kept(numbers: tuple[float, ...] | tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # training may read what an evaluation made
        return _made(numbers, device)
