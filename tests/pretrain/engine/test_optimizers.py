"""AdamW as in EIFY/fairseq, the table of optimizers, and parameter groups."""

import typing

import pytest
import torch
from torch import nn

from pretrain.config.sections import OptimizerConfig
from pretrain.engine import optimizers
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel


def test_a_step_follows_the_formula_of_the_paper():
    """Compared with the formula in double precision."""
    config = OptimizerConfig(epsilon=1e-2, weight_decay=0.1)
    weight = nn.Parameter(torch.tensor([0.5, -2.0, 1e-3], dtype=torch.float64))
    model = nn.ParameterDict({"weight": weight})
    adam = optimizers.build(model, config)
    expected = weight.detach().clone()
    first, second = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for step, rate in enumerate([1e-2, 5e-3, 2e-2, 1e-2]):
        gradient = torch.tensor([1.0, -0.1, 1e-4], dtype=torch.float64) * (step + 1)
        first = 0.9 * first + 0.1 * gradient
        second = 0.98 * second + 0.02 * gradient**2
        expected *= 1 - rate * 0.1
        size = rate * (1 - 0.98 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1))
        expected -= size * first / (second.sqrt() + 1e-2)
        weight.grad = gradient
        optimizers.set_step(adam.param_groups, config, rate, step)
        adam.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("variant", presets.VARIANTS)
def test_every_parameter_is_in_one_group_and_decay_on_matrices_spares_the_others(variant):
    model = LanguageModel(presets.build("tiny", variant, 100, {}))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    (everything,) = optimizers.parameter_groups(model, OptimizerConfig())
    assert [id(p) for p in everything["params"]] == list(names)
    assert everything["weight_decay"] == 0.01
    config = OptimizerConfig(weight_decay_on="matrices")
    decayed, spared = optimizers.parameter_groups(model, config)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    for decay_on, decay in (("all", 0.01), ("matrices", 0.0)):
        config = OptimizerConfig(name="lamb", weight_decay_on=decay_on)
        first, second = optimizers.parameter_groups(model, config)
        assert first == {**decayed, "trust_ratio": True}
        assert second == {**spared, "weight_decay": decay, "trust_ratio": False}
    found = [names[id(p)] for group in (decayed, spared) for p in group["params"]]
    assert sorted(found) == sorted(names.values())
    for parameter in spared["params"]:
        name = names[id(parameter)]
        assert name.endswith((".bias", "norm.weight", "beta")), name
    for parameter in decayed["params"]:
        name = names[id(parameter)]
        assert name.endswith((".weight", ".basis")), name
        assert "norm" not in name


def test_parameters_without_gradients_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (group,) = optimizers.parameter_groups(model, OptimizerConfig())
    assert len(group["params"]) == 1


def test_every_optimizer_of_the_recipe_is_in_the_table():
    names = typing.get_type_hints(OptimizerConfig)["name"]
    assert typing.get_args(names) == tuple(optimizers.OPTIMIZERS)
