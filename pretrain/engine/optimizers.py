"""The optimizers: AdamW as in EIFY/fairseq, and LAMB as in ALBERT's code.

A new one is a class, in a file of its own, and an entry in OPTIMIZERS; one that needs the norms of
whole parameters under ZeRO is a subclass of Lamb, which the engine tells where they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from pretrain.config.run import OptimizerConfig
from pretrain.engine.lamb import Lamb


def _adamw_epsilon(config: OptimizerConfig, step: int) -> float:
    """Return the epsilon that torch's AdamW takes in update `step`, counted from 0.

    EIFY/fairseq, like the end of section 2 of Kingma & Ba 2015, moves a weight by
    rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon), with t counted from 1. torch
    divides v by 1 - beta2^t before it adds epsilon. Dividing epsilon by the square root of
    1 - beta2^t gives the same update. The difference matters in the first hundred steps only.
    """
    root: float = (1.0 - config.beta2 ** (step + 1)) ** 0.5
    return config.epsilon / root


class Kind(NamedTuple):
    """How an optimizer is built and told its step."""

    build: Callable[..., torch.optim.Optimizer]
    """Takes parameter groups, `lr`, `betas` and `eps`."""
    epsilon: Callable[[OptimizerConfig, int], float]
    """`eps` of an update, counted from 0."""
    by_tensor: bool
    """Whether its update depends on the norms of whole parameters. If so, biases, layer norms and
    scalars have a group with `trust_ratio` False."""


OPTIMIZERS = {
    "adamw": Kind(functools.partial(torch.optim.AdamW, fused=True), _adamw_epsilon, False),
    "lamb": Kind(Lamb, lambda config, step: config.epsilon, True),
}
"""By the recipe's `optimizer.name`."""


def build(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of a model; call `set_step` before each of its steps."""
    return OPTIMIZERS[config.name].build(
        parameter_groups(model, config),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Group the trained parameters of a model by their weight decay and trust ratio.

    Matrices are weights of linear layers, embeddings and the basis of latents; the others are
    biases, layer norms and scalars. `weight_decay_on` says which of the two decay, and LAMB's trust
    ratio is always that of matrices alone: "matrices" gives the exclusions of ALBERT's code, "all"
    of EIFY/fairseq's AdamW. Parameters that require no gradient are left out.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    by_tensor = OPTIMIZERS[config.name].by_tensor
    if config.weight_decay_on == "all" and not by_tensor:
        return [{"params": trained, "weight_decay": config.weight_decay}]
    matrices: dict[str, Any] = {
        "params": [p for p in trained if p.ndim >= 2],
        "weight_decay": config.weight_decay,
    }
    others: dict[str, Any] = {
        "params": [p for p in trained if p.ndim < 2],
        "weight_decay": config.weight_decay if config.weight_decay_on == "all" else 0.0,
    }
    if by_tensor:
        matrices["trust_ratio"], others["trust_ratio"] = True, False
    return [matrices, others]


def set_step(
    groups: Iterable[dict[str, Any]], config: OptimizerConfig, learning_rate: float, step: int
) -> None:
    """Set the learning rate and epsilon of update `step`, counted from 0."""
    epsilon = OPTIMIZERS[config.name].epsilon(config, step)
    for group in groups:
        group["lr"] = learning_rate
        group["eps"] = epsilon
