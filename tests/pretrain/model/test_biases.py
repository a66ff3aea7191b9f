"""ALiBi: slopes, the shapes for encoders, and trained slopes."""

import pytest
import torch
from safetensors.torch import load_file

from pretrain.model import biases
from pretrain.model.biases import Alibi, alibi_slopes, constant
from pretrain.model.config import CHOICES, ModelConfig
from tests.pretrain.model.test_parity import slopes_by_formula
from tests.pretrain.model.test_positions import VOCABULARY, ids_of, tiny

CPU = torch.device("cpu")
every_shape = pytest.mark.parametrize("shape", CHOICES["alibi"])


def alibi(heads, length, kind):
    """The bias [H, T, T] of ALiBi."""
    config = ModelConfig(VOCABULARY, hidden_size=8 * heads, num_heads=heads, alibi=kind)
    index = torch.arange(length)
    return Alibi(config)(CPU)(torch.arange(heads)[:, None, None], index[:, None], index)


@pytest.mark.parametrize("make", [torch.inference_mode, torch.no_grad])
def test_the_slopes_stay_on_the_device_for_later_batches_of_training_too(make):
    """A copy in every batch would make the host wait for a GPU."""
    biases._kept.cache_clear()
    config = ModelConfig(VOCABULARY, hidden_size=32, num_heads=4)
    with make():
        first = constant(tuple(alibi_slopes(4)), CPU)
    assert constant(tuple(alibi_slopes(4)), CPU) is first
    query = torch.ones(4, 1, 1, requires_grad=True)
    index = torch.arange(3)
    bias = Alibi(config)(CPU)(torch.arange(4)[:, None, None], index[:, None], index)
    (query * bias).sum().backward()  # keeps the bias
    assert query.grad is not None


# --- slopes and tables --------------------------------------------------------------------------


def test_alibi_tables_and_slopes_are_those_of_fairseq(golden):
    tables = load_file(golden / "alibi_tables.safetensors")
    for heads in (4, 6, 8, 12, 16, 20):
        torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), tables[f"slopes_{heads}"])
        for kind, name in (("offset", "asym"), ("symmetric", "sym")):
            torch.testing.assert_close(alibi(heads, 8, kind), tables[f"{name}_{heads}"])


def test_any_number_of_heads_has_distinct_slopes_below_one():
    for heads in range(1, 65):
        slopes = alibi_slopes(heads)
        assert slopes == pytest.approx(slopes_by_formula(heads))
        assert len(set(slopes)) == heads
        assert 0 < min(slopes) <= max(slopes) < 1


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_casting_the_model_to_bf16_does_not_coarsen_the_alibi_bias(default):
    """Law 7: rounded once, from exact fp32 distances; bf16 has 256 of them."""
    model = tiny("alibi").to(torch.bfloat16)
    exact = alibi(4, 600, "offset")
    assert exact.dtype == torch.float32
    torch.set_default_dtype(default)
    try:
        _, context = model.encoder.embed(ids_of(1, 600), None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(context.bias[0], exact.to(torch.bfloat16))
    index = torch.arange(600, dtype=torch.float32)
    assert torch.equal(exact[0, 599], -0.25 * (599 - index))


# --- trained slopes -----------------------------------------------------------------------------


@every_shape
def test_trained_slopes_begin_as_the_fixed_ones_and_are_trained(shape):
    fixed, trained = tiny("alibi", alibi=shape), tiny("alibi", alibi=shape, alibi_slopes="trained")
    ids, places = ids_of(2, 30), torch.arange(60)
    logits = trained(ids, None, places)
    torch.testing.assert_close(logits, fixed(ids, None, places), rtol=0, atol=1e-6)
    logits.square().sum().backward()
    gradient = trained.encoder.score_bias.logits.grad
    assert gradient.isfinite().all()
    assert (gradient != 0).all()
    assert len(gradient) == (8 if shape == "by-direction" else 4)


@every_shape
def test_trained_slopes_are_nearly_the_same_in_bf16(shape):
    module = tiny("alibi", alibi=shape, alibi_slopes="trained").encoder.score_bias
    index, head = torch.arange(20), torch.arange(4)[:, None, None]
    expected = module(CPU)(head, index[:, None], index)
    rounded = module.bfloat16()(CPU)(head, index[:, None], index)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, expected, rtol=0.03, atol=0)
