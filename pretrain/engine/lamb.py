"""LAMB as in ALBERT's code: Adam's update with a learning rate for each parameter tensor.

You et al. 2020 (arXiv 1904.00962), algorithm 2, as google-research/albert has it
(`lamb_optimizer.py`), without bias correction:

    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    update = m / (sqrt(v) + epsilon) + decay w
    w = w - rate ratio update,    ratio = ||w|| / ||update||, or 1 where either norm is 0

The projection of query, key and value is one matrix with one ratio here; ALBERT has three of each.

DeepSpeed's own (`deepspeed.ops.lamb.FusedLamb`) is a CUDA kernel, and knows only the tensors that
it is given: under ZeRO it would compute the norms of partitions. It also corrects the bias, bounds
the ratio, and has a ratio for biases and layer norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """LAMB whose tensors may be whole parameters, or partitions of concatenated parameters.

    A parameter group with `trust_ratio` False has a ratio of 1 (in ALBERT: biases and layer norms).
    The norms of a parameter that is partitioned over ranks are those of the whole parameter: the
    sums of squares of all pieces of a group are added over the ranks at once, in fp64.
    """

    needs_pieces = True
    """Whether it needs `set_pieces` under ZeRO."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Take parameter groups with their `weight_decay` and `trust_ratio`."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._pieces: Mapping[Tensor, Sequence[int]] = {}
        self._sum_over_ranks: Callable[[list[float]], list[float]] = list

    def set_pieces(
        self,
        pieces: Mapping[Tensor, Sequence[int]],
        sum_over_ranks: Callable[[list[float]], list[float]],
    ) -> None:
        """Say of which pieces of parameters the tensors consist.

        Args:
            pieces: for each tensor, the lengths of its pieces, 0 included: of the same parameters,
                in the same order, on all ranks. Empty: the tensors are whole parameters.
            sum_over_ranks: adds the elements of a list over the ranks, in fp64.
        """
        self._pieces, self._sum_over_ranks = pieces, sum_over_ranks

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the tensors that have a gradient.

        All ranks must call it equally often, with the same groups.
        """
        for group in self.param_groups:
            weights = [tensor for tensor in group["params"] if tensor.grad is not None]
            if weights:
                updates = self._updates(weights, group)
                if group["trust_ratio"]:
                    self._scale(updates, weights)
                torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _updates(self, weights: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """Advance the moments; returns the updates before they are scaled."""
        gradients = [tensor.grad for tensor in weights if tensor.grad is not None]
        beta1, beta2 = group["betas"]
        for tensor in weights:
            if not self.state[tensor]:
                self.state[tensor]["exp_avg"] = torch.zeros_like(tensor)
                self.state[tensor]["exp_avg_sq"] = torch.zeros_like(tensor)
        first = [self.state[tensor]["exp_avg"] for tensor in weights]
        second = [self.state[tensor]["exp_avg_sq"] for tensor in weights]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        updates = list(torch._foreach_sqrt(second))
        torch._foreach_add_(updates, group["eps"])
        # In place, because each temporary is as large as the weights.
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, first)
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        return updates

    def _scale(self, updates: list[Tensor], weights: list[Tensor]) -> None:
        """Multiply the updates by the ratios of their parameters, in place."""
        if self._pieces:
            lengths = [self._pieces[tensor] for tensor in weights]
            updates, weights = _split(updates, lengths), _split(weights, lengths)
        sums = self._sum_over_ranks(square_sums([*weights, *updates]))
        half = len(weights)
        ratios = [
            math.sqrt(weight / update) if weight > 0 and update > 0 else 1.0
            for weight, update in zip(sums[:half], sums[half:], strict=True)
        ]
        torch._foreach_mul_(updates, ratios)


def _split(tensors: list[Tensor], lengths: list[Sequence[int]]) -> list[Tensor]:
    pairs = zip(tensors, lengths, strict=True)
    return [part for tensor, sections in pairs for part in tensor.split_with_sizes(sections)]


def square_sums(tensors: list[Tensor]) -> list[float]:
    """Compute the sum of the squares of each tensor with an error of 1e-6 at most.

    On a CPU, torch's fp32 norm of 40 million elements has an error of 2e-3, and the fp64 norm takes
    ten times as long. The norms of chunks are computed in fp32, and their squares added in fp64.
    """
    chunks = [torch.split(tensor.reshape(-1), 2**16) for tensor in tensors]
    norms = torch.stack(torch._foreach_norm([chunk for part in chunks for chunk in part]))
    squares = norms.cpu().double().square().split_with_sizes([len(part) for part in chunks])
    return [float(part.sum()) for part in squares]
