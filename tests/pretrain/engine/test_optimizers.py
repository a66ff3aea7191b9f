"""AdamW as in EIFY/fairseq, and its parameter groups."""

import pytest
import torch
from torch import nn

from pretrain.config.run import OptimizerConfig
from pretrain.engine import optimizers
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel

KEY = "encoder.sentence_encoder.embed_tokens.weight"


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
    (everything,) = optimizers.parameter_groups(model, 0.01, "all")
    assert [id(p) for p in everything["params"]] == list(names)
    assert everything["weight_decay"] == 0.01
    decayed, spared = optimizers.parameter_groups(model, 0.01, "matrices")
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    found = [names[id(p)] for group in (decayed, spared) for p in group["params"]]
    assert sorted(found) == sorted(names.values())
    for parameter in spared["params"]:
        name = names[id(parameter)]
        assert name.endswith((".bias", "norm.weight", "beta")), name
    for parameter in decayed["params"]:
        name = names[id(parameter)]
        assert name.endswith(".weight"), name
        assert "norm" not in name


def test_parameters_without_gradients_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (group,) = optimizers.parameter_groups(model, 0.0, "all")
    assert len(group["params"]) == 1
