"""AdamW as in EIFY/fairseq: decoupled weight decay, epsilon outside the bias correction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pretrain.config.run import OptimizerConfig


def build(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build the optimizer of a model; call `set_step` before each of its steps."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay, config.weight_decay_on),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def parameter_groups(model: nn.Module, decay: float, decay_on: str) -> list[dict[str, Any]]:
    """Group the trained parameters of a model by their weight decay.

    Args:
        model: parameters that require no gradient are left out.
        decay: weight decay per unit of learning rate.
        decay_on: "all" (as in EIFY/fairseq), or "matrices": weights of linear layers and
            embeddings, without biases, layer norms and scalars.
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
    """Set the learning rate and epsilon of update `step`, counted from 0.

    EIFY/fairseq, like the end of section 2 of Kingma & Ba 2015, moves a weight by
    rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon), with t counted from 1. torch
    divides v by 1 - beta2^t before it adds epsilon. Dividing epsilon by the square root of
    1 - beta2^t gives the same update. The difference matters in the first hundred steps only.
    """
    epsilon = config.epsilon / (1.0 - config.beta2 ** (step + 1)) ** 0.5
    for group in groups:
        group["lr"] = learning_rate
        group["eps"] = epsilon
