"""The optimizers: AdamW as in EIFY/fairseq, LAMB as in ALBERT's code, and Muon.

A new one is a class, in a file of its own, and an entry in OPTIMIZERS; one that needs whole
parameters under ZeRO is a subclass of ByParameter, which the engine tells where they lie.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from pretrain.config.sections import OptimizerConfig
from pretrain.engine.lamb import Lamb
from pretrain.engine.muon import Muon


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
    epsilon: Callable[[OptimizerConfig, int], float] = lambda config, step: config.epsilon
    """`eps` of an update, counted from 0."""
    options: Callable[[str, nn.Parameter, nn.Module], dict[str, Any]] = lambda *_: {}
    """Options of a parameter's group beside the weight decay, given its name and the model."""


_MOMENTUM = 0.95
"""Decay rate of Muon's momentum, as in Jordan et al. 2024 and Liu et al. 2025; nobody has gained by
another one, and beta1 and beta2 are those of its AdamW."""


def _muon_options(name: str, parameter: nn.Parameter, model: nn.Module) -> dict[str, Any]:
    """Of weights of linear layers in the layers: how many matrices they are, above each other."""
    if parameter.ndim != 2 or ".layers." not in name:
        return {"matrices": 0}
    layer = model.get_submodule(name.removesuffix(".weight"))
    return {"matrices": getattr(layer, "matrices", 1), "momentum": _MOMENTUM}


OPTIMIZERS = {
    "adamw": Kind(functools.partial(torch.optim.AdamW, fused=True), _adamw_epsilon),
    "lamb": Kind(Lamb, options=lambda name, parameter, _: {"trust_ratio": parameter.ndim >= 2}),
    "muon": Kind(functools.partial(Muon, fused=True), _adamw_epsilon, _muon_options),
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
    """Group the trained parameters of a model by their weight decay and the optimizer's options.

    Matrices are weights of linear layers, embeddings and the basis of latents; the others are
    biases, layer norms and scalars. `weight_decay_on` says which of the two decay. LAMB's trust
    ratio is always that of matrices alone: "matrices" gives the exclusions of ALBERT's code, "all"
    of EIFY/fairseq's AdamW. Parameters that require no gradient are left out.
    """
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = config.weight_decay_on == "all" or parameter.ndim >= 2
        options = {
            "weight_decay": config.weight_decay if decays else 0.0,
            **OPTIMIZERS[config.name].options(name, parameter, model),
        }
        group = groups.setdefault((*options.items(),), {"params": [], **options})
        group["params"].append(parameter)
    return [*groups.values()]


def set_step(
    groups: Iterable[dict[str, Any]], config: OptimizerConfig, learning_rate: float, step: int
) -> None:
    """Set the learning rate and epsilon of update `step`, counted from 0."""
    epsilon = OPTIMIZERS[config.name].epsilon(config, step)
    for group in groups:
        group["lr"] = learning_rate
        group["eps"] = epsilon
