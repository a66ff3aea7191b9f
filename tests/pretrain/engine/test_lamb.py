"""LAMB: the formula and its exceptions; test_by_parameter.py has partitions on several ranks."""

import numpy as np
import pytest
import torch
from torch import nn

from pretrain.config.sections import OptimizerConfig
from pretrain.engine import optimizers
from pretrain.engine.lamb import Lamb

RATE = 1e-2
SETTINGS = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-6}


@pytest.mark.parametrize("scale", [1, 1000])
def test_steps_follow_the_formula_and_biases_have_neither_decay_nor_ratio(scale):
    """Compared with NumPy in double precision; the ratios are below 1, or above 10."""
    decay = {"weight_decay": 0.01, "weight_decay_on": "matrices"}
    config = OptimizerConfig(name="lamb", beta2=0.999, epsilon=1e-6, **decay)
    torch.manual_seed(1)
    model = nn.Linear(7, 5).double()
    model.weight.data *= scale
    lamb = optimizers.build(model, config)
    for parameter, decay in ((model.weight, 0.01), (model.bias, 0.0)):
        weight = parameter.detach().numpy().copy()
        first, second = np.zeros_like(weight), np.zeros_like(weight)
        for step, rate in enumerate([1e-2, 5e-3, 2e-2, 1e-2]):
            gradient = np.random.default_rng(step).normal(size=weight.shape)
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            update = first / (np.sqrt(second) + 1e-6) + decay * weight
            ratio = np.linalg.norm(weight) / np.linalg.norm(update) if decay else 1.0
            assert (ratio > 10) == (scale > 1 and decay > 0)
            weight -= rate * ratio * update
            model.zero_grad()
            parameter.grad = torch.from_numpy(gradient)
            optimizers.set_step(lamb.param_groups, config, rate, step)
            lamb.step()
            np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-12)


def test_the_ratio_is_1_where_a_norm_is_0():
    zeros, still = torch.zeros(2, 2), torch.ones(2, 2)
    group = {"params": [zeros, still], "weight_decay": 0.0, "trust_ratio": True}
    lamb = Lamb([group], **SETTINGS | {"betas": (0.0, 0.0)})
    zeros.grad, still.grad = torch.full((2, 2), 3.0), torch.zeros(2, 2)
    lamb.step()
    torch.testing.assert_close(zeros, torch.full((2, 2), -RATE))
    assert torch.equal(still, torch.ones(2, 2))
