"""Optimizers that act on whole parameters, and their pieces on several ranks."""

import pytest
import torch
from torch import nn

from pretrain.config.sections import OptimizerConfig
from pretrain.engine import muon, optimizers, reshard
from pretrain.engine.lamb import Lamb
from pretrain.engine.muon import Muon
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from tests.pretrain.builders import slow

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6}
SHAPES = [(3, 5), (1, 2), (40, 7), (1, 1), (16, 16)]
KINDS = {
    "lamb": (Lamb, SHAPES, {"trust_ratio": True}),
    "muon": (Muon, SHAPES, {"matrices": 1, "momentum": 0.9}),
    "muon, stacked": (Muon, [(3, 4), (36, 5), (15, 20)], {"matrices": 3, "momentum": 0.9}),
    "muon's adamw": (Muon, SHAPES, {"matrices": 0}),
}
"""The class, shapes of parameters, and options of their group."""


def drawn(shapes, step):
    """Weights or gradients of different norms."""
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=draw) * 3.0**n for n, shape in enumerate(shapes)]


def train(kind, tensors, gradients_of, pieces=None):
    optimizer_class, shapes, options = KINDS[kind]
    group = {"params": tensors, "weight_decay": 0.1, **options}
    optimizer = optimizer_class([group], **SETTINGS)
    if pieces:
        optimizer.set_pieces(pieces, torch.device("cpu"))
    for step in range(1, 6):
        for tensor, gradient in zip(tensors, gradients_of(drawn(shapes, step)), strict=True):
            tensor.grad = gradient
        optimizer.step()
    return tensors


@pytest.mark.parametrize(
    ("stage", "ranks"), [(1, 1), (1, 3), (3, 2), (3, 7), *slow((1, 2), (1, 7), (3, 1), (3, 3))]
)
def test_partitions_are_updated_like_whole_parameters(stage, ranks, run_ranks, monkeypatch):
    """Also where a parameter lies on all ranks, on one, or begins on one and ends on the next."""
    monkeypatch.setattr(muon, "_BUCKET", 300)

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
        from pretrain.engine.engine import start

        rank, found = start().rank, {}
        for kind, (_, shapes, _) in KINDS.items():
            mine = partition(drawn(shapes, 0), rank)
            pieces = reshard.pieces(stage, shapes, len(mine), rank, ranks)
            assert sum(piece.length for piece in pieces) <= len(mine)

            def gradients(whole, rank=rank):
                return [partition(whole, rank)]

            (found[kind],) = train(kind, [mine], gradients, {mine: pieces})
        return found

    for rank, found in enumerate(run_ranks(ranks, work)):
        for kind, (_, shapes, _) in KINDS.items():
            whole = train(kind, drawn(shapes, 0), lambda gradients: gradients)
            expected = partition(whole, rank)
            torch.testing.assert_close(found[kind], expected, rtol=1e-6, atol=1e-7, msg=kind)
            if "muon" in kind:
                assert torch.equal(found[kind], expected), kind


@pytest.mark.parametrize("variant", ["baseline", "modern", "albert", "char-perceiver"])
def test_muon_is_torch_s_own_for_the_matrices_of_layers_and_adamw_for_the_rest(
    variant, monkeypatch
):
    """Bit for bit in bf16, as on a GPU. Query, key, value and gate are matrices of their own."""
    monkeypatch.setattr(muon, "_precision", lambda device: torch.bfloat16)
    config = OptimizerConfig(name="muon", weight_decay=0.1, weight_decay_on="matrices")
    torch.manual_seed(1)
    overrides = {"num_layers": 3, "latents": 8} if variant == "char-perceiver" else {}
    model = LanguageModel(presets.build("tiny", variant, 100, overrides))
    ours = optimizers.build(model, config)
    matrices, names = {}, []
    for name, parameter in model.named_parameters():
        if "encoder.layers." in name and parameter.ndim == 2:
            gated = variant == "modern" and "expand" in name
            count = 3 if "query_key_value" in name else 2 if gated else 1
            matrices[name] = [nn.Parameter(m.clone()) for m in parameter.detach().chunk(count)]
        else:
            names.append(name)
    state = dict(model.named_parameters())
    rest = {name: nn.Parameter(state[name].detach().clone()) for name in names}
    theirs = torch.optim.Muon(
        [m for found in matrices.values() for m in found],
        momentum=0.95,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = optimizers.build(
        nn.ParameterDict({n.replace(".", "-"): p for n, p in rest.items()}),
        OptimizerConfig(weight_decay=0.1, weight_decay_on="matrices"),
    )
    for step, rate in enumerate([1e-2, 5e-3, 2e-2]):
        torch.manual_seed(step)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            if name in matrices:
                parts = parameter.grad.chunk(len(matrices[name]))
                for matrix, part in zip(matrices[name], parts, strict=True):
                    matrix.grad = part.clone()
            else:
                rest[name].grad = parameter.grad.clone()
        optimizers.set_step(ours.param_groups, config, rate, step)
        ours.step()
        theirs.param_groups[0]["lr"] = rate
        theirs.step()
        optimizers.set_step(adamw.param_groups, OptimizerConfig(), rate, step)
        adamw.step()
    assert len(matrices) >= 4
    for name, parameter in model.named_parameters():
        expected = torch.cat(matrices[name]) if name in matrices else rest[name]
        assert torch.equal(parameter, expected), name
