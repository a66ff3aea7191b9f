"""StableAdamW: AdamW whose learning rate falls for a parameter where the gradient outgrew v.

Wortsman et al. 2023 (arXiv 2304.13013), algorithm 2, which takes the clipping from AdaFactor
(Shazeer & Stern 2018, section 6). For each parameter tensor, with t counted from 1 and decay rates
corrected for the bias, b = beta (1 - beta^(t-1)) / (1 - beta^t):

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    RMS = sqrt(mean(g^2 / max(v, epsilon^2)))
    w = w - rate / max(1, RMS) (m / (sqrt(v) + epsilon) + decay w)

ModernBERT was trained with it in place of clipping the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pretrain.engine.by_parameter import ByParameter, with_gradient


class StableAdamW(ByParameter):
    """StableAdamW; RMS is that of the whole parameter, wherever its pieces lie."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the tensors that have a gradient.

        All ranks must call it equally often, with the same groups.
        """
        for group in self.param_groups:
            weights, gradients = with_gradient(group)
            if not weights:
                continue
            for tensor in weights:
                if not self.state[tensor]:
                    self.state[tensor]["step"] = torch.zeros(())
                    self.state[tensor]["exp_avg"] = torch.zeros_like(tensor)
                    self.state[tensor]["exp_avg_sq"] = torch.zeros_like(tensor)
                self.state[tensor]["step"] += 1
            first = [self.state[tensor]["exp_avg"] for tensor in weights]
            second = [self.state[tensor]["exp_avg_sq"] for tensor in weights]
            number = float(self.state[weights[0]]["step"])
            beta1, beta2 = (_corrected(beta, number) for beta in group["betas"])
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            updates = list(torch._foreach_sqrt(second))
            scaled = list(torch._foreach_clamp_min(updates, max(group["eps"], _SMALLEST)))
            torch._foreach_reciprocal_(scaled)
            torch._foreach_mul_(scaled, gradients)
            sums, sizes = self.square_sums(self.parts(scaled, weights)), self.sizes(weights)
            torch._foreach_add_(updates, group["eps"])
            torch._foreach_reciprocal_(updates)
            torch._foreach_mul_(updates, first)
            if group["weight_decay"]:
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            shares = [max(1.0, s / n) ** -0.5 for s, n in zip(sums, sizes, strict=True)]
            torch._foreach_mul_(self.parts(updates, weights), shares)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])


_SMALLEST = 1e-30
"""In place of an epsilon of 0, by which an element without a gradient would be divided."""


def _corrected(beta: float, number: float) -> float:
    """Return the decay rate of update `number`, from 1, that makes a moment a weighted mean."""
    return float(beta * (1 - beta ** (number - 1)) / (1 - beta**number))
