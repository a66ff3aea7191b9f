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

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pretrain.engine.by_parameter import ByParameter, with_gradient


class Lamb(ByParameter):
    """LAMB; the norms are those of whole parameters, wherever their pieces lie.

    A parameter group with `trust_ratio` False has a ratio of 1 (in ALBERT: biases and layer norms).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:  # noqa: ANN401
        """Take parameter groups, and the options that all have: `lr`, `betas` and `eps`."""
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the tensors that have a gradient.

        All ranks must call it equally often, with the same groups.
        """
        for group in self.param_groups:
            weights, gradients = with_gradient(group)
            if weights:
                updates = self._updates(weights, gradients, group)
                if group["trust_ratio"]:
                    self._scale(updates, weights)
                torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _updates(
        self, weights: list[Tensor], gradients: list[Tensor], group: Mapping[str, Any]
    ) -> list[Tensor]:
        """Advance the moments; returns the updates before they are scaled."""
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
        updates, weights = self.parts(updates, weights), self.parts(weights, weights)
        sums = self.square_sums([*weights, *updates])
        half = len(weights)
        ratios = [
            math.sqrt(weight / update) if weight > 0 and update > 0 else 1.0
            for weight, update in zip(sums[:half], sums[half:], strict=True)
        ]
        torch._foreach_mul_(updates, ratios)
