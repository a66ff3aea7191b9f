"""LAMB: the formula, its exceptions, and partitions of parameters on several ranks."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from pretrain.config.run import OptimizerConfig
from pretrain.engine import optimizers, reshard
from pretrain.engine.lamb import Lamb

RATE = 1e-2
SETTINGS = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-6}


def test_steps_follow_the_formula_and_biases_have_neither_decay_nor_ratio():
    """Compared with NumPy in double precision."""
    config = OptimizerConfig(
        name="lamb", beta2=0.999, weight_decay=0.1, weight_decay_on="matrices", epsilon=1e-6
    )
    torch.manual_seed(1)
    model = nn.Linear(7, 5).double()
    lamb = optimizers.build(model, config)
    for parameter, decay in ((model.weight, 0.1), (model.bias, 0.0)):
        weight = parameter.detach().numpy().copy()
        first, second = np.zeros_like(weight), np.zeros_like(weight)
        for step, rate in enumerate([1e-2, 5e-3, 2e-2, 1e-2]):
            gradient = np.random.default_rng(step).normal(size=weight.shape)
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            update = first / (np.sqrt(second) + 1e-6) + decay * weight
            ratio = np.linalg.norm(weight) / np.linalg.norm(update) if decay else 1.0
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


SHAPES = [(3, 5), (1, 2), (40, 7), (1, 1), (16, 16)]


def drawn(step):
    """Weights or gradients of different norms."""
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=draw) * 3.0**n for n, shape in enumerate(SHAPES)]


def train(tensors, gradients_of, **pieces):
    group = {"params": tensors, "weight_decay": 0.1, "trust_ratio": True}
    lamb = Lamb([group], **SETTINGS)
    if pieces:
        lamb.set_pieces(**pieces)
    for step in range(1, 6):
        for tensor, gradient in zip(tensors, gradients_of(drawn(step)), strict=True):
            tensor.grad = gradient
        lamb.step()
    return tensors


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("stage", [1, 3])
def test_partitions_are_updated_like_whole_parameters(stage, ranks, run_ranks):
    """Also where a parameter lies on all ranks, on one, or begins on one and ends on the next."""
    lengths = [tensor.numel() for tensor in drawn(0)]

    def partition(tensors, rank):
        flat = [tensor.flatten() for tensor in tensors]
        flat = flat if stage == 3 else [torch.cat(flat)]
        sizes = [-(-len(tensor) // ranks) for tensor in flat]
        padded = [
            nn.functional.pad(tensor, (0, size * ranks - len(tensor)))
            for tensor, size in zip(flat, sizes, strict=True)
        ]
        return torch.cat([t[rank * n : (rank + 1) * n] for t, n in zip(padded, sizes, strict=True)])

    def work():
        from pretrain.engine.distributed import all_sum
        from pretrain.engine.engine import start

        rank, device = start().rank, torch.device("cpu")
        mine = partition(drawn(0), rank)
        sections = reshard.pieces(stage, lengths, len(mine), rank, ranks)
        assert sum(sections) == len(mine)
        return train(
            [mine],
            lambda whole: [partition(whole, rank)],
            pieces={mine: sections},
            sum_over_ranks=functools.partial(all_sum, device=device),
        )[0]

    whole = train(drawn(0), lambda gradients: gradients)
    for rank, found in enumerate(run_ranks(ranks, work)):
        torch.testing.assert_close(found, partition(whole, rank), rtol=1e-6, atol=1e-7)
