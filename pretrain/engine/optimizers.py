"""The original's Adam: decoupled weight decay, and epsilon outside the bias correction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pretrain.config.run import OptimizerConfig


def build(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimiser of a model; `set_step` has to be called before each of its steps."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay, config.weight_decay_on),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def parameter_groups(model: nn.Module, decay: float, decay_on: str) -> list[dict[str, Any]]:
    """Which parameters decay.

    Args:
        model: those of its parameters that are trained are taken.
        decay: weight decay per unit of learning rate.
        decay_on: "all" (the original), or "matrices": weights of linear layers and embeddings, but
            no bias, no layer norm and no scalar.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if decay_on == "all":
        return [{"params": trained, "weight_decay": decay}]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def set_step(
    groups: Iterable[dict[str, Any]], config: OptimizerConfig, learning_rate: float, step: int
) -> None:
    """Prepare update `step`, counted from 0.

    The original, as section 2 of Kingma & Ba 2015 puts it at its end, moves a weight by
    rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon), t counted from 1. torch
    divides v by 1 - beta2^t before epsilon is added; the same epsilon divided by the root of that
    gives the original's step. It matters in the first hundred steps alone.
    """
    epsilon = config.epsilon / (1.0 - config.beta2 ** (step + 1)) ** 0.5
    for group in groups:
        group["lr"] = learning_rate
        group["eps"] = epsilon
