"""Models with latents: who sees whom, what is exact, and what is refused."""

import math

import pytest
import torch

from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import checkpoint_activations
from tests.pretrain.model.test_positions import VOCABULARY, ids_of

VARIANTS = ("char-vanilla", "char-perceiver")
POSITIONS = ("learned", "rotary", "t5-bias", "alibi")
"""On embeddings, on queries and keys, and on scores, trained and fixed."""
LENGTHS = (20, 3, 8, 13)
"""Tokens of the rows of a batch."""
TEXT = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def tiny(variant="char-perceiver", scale=1.0, **overrides):
    """A model; scaled, its layers attend more than those of fresh weights do."""
    torch.manual_seed(0)
    fields = {"num_layers": 4, "dropout": 0.0, "attention_dropout": 0.0, **overrides}
    model = LanguageModel(presets.build("tiny", variant, VOCABULARY, fields)).eval()
    with torch.no_grad():
        for name, weight in model.encoder.named_parameters():
            if weight.dim() == 2 and name != "basis":
                weight *= scale
    return model


def with_latents(**overrides):
    return tiny(scale=8.0, **{"latents": 8, **overrides})


@pytest.mark.parametrize(
    ("variant", "count"), [("char-vanilla", 3_323_392), ("char-perceiver", 3_339_776)]
)
def test_models_of_characters_have_the_assignments_number_of_parameters(variant, count):
    model = LanguageModel(presets.build("char", variant, 256, {}))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("position", "length"),
    [*(("learned", length) for length in (40, 64, 65, 128)), *((p, 90) for p in POSITIONS[1:])],
)
def test_an_output_depends_on_these_inputs_and_on_no_other(variant, position, length):
    """By gradients, of every output. A longer row stands beside it, and padding after it."""
    model = tiny(variant, scale=4.0, max_positions=140, position=position)
    ids = ids_of(2, 140)
    embeddings = []

    def keep(module, arguments, output):
        output.retain_grad()
        embeddings.append(output)

    model.encoder.embeddings.register_forward_hook(keep)
    features = model.encoder(ids, torch.arange(140) < torch.tensor([[length], [140]]))
    for place in range(0, length, 1 if length == 128 else 13):
        total = features[0, place].square().sum()
        (gradient,) = torch.autograd.grad(total, embeddings, retain_graph=True)
        assert gradient.isfinite().all()
        read = set(gradient[0].abs().sum(dim=1).nonzero().flatten().tolist())
        expected = set(range(place + 1))
        if variant == "char-perceiver":
            expected = {*range(min(place, 63) + 1), place}
        assert read == expected
        assert not gradient[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("position", POSITIONS)
def test_numbers_and_gradients_are_finite(position, dtype):
    """Large weights, whose scores could pass the lowest number of the type."""
    model = with_latents(position=position).to(dtype)
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.attention.query_key_value.weight *= 10
    features = model.encoder(ids_of(4, 20), TEXT)
    features.float().square().mean().backward()
    assert features.isfinite().all()
    for name, parameter in model.encoder.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("position", POSITIONS)
def test_recomputed_layers_have_the_same_gradients_with_the_same_dropout(position):
    gradients = []
    for recompute in (False, True):
        model = with_latents(dropout=0.1, attention_dropout=0.1, position=position).train()
        if recompute:
            checkpoint_activations(model)
        torch.manual_seed(3)
        model(ids_of(4, 20), TEXT, torch.arange(0, 80, 3)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, ours in zip(*gradients, strict=True):
        assert torch.equal(plain, ours)


def test_the_basis_is_drawn_by_xavier():
    basis = tiny(latents=64).encoder.basis.detach()
    bound = math.sqrt(6 / (64 * 32 + 32))  # of a tensor [1, 64, 32], as in CS224N
    assert 0.98 * bound < float(basis.abs().max()) <= bound
    assert float(basis.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_what_latents_cannot_read_is_refused():
    model, ids = with_latents(), ids_of(1, 9)
    with pytest.raises(ValueError, match="document_ids: integers are not accepted with latents"):
        model.encoder(ids, torch.ones_like(ids))
    with pytest.raises(ValueError, match="this model has 8 latents"):
        model.encoder.hidden_states(ids)
    with pytest.raises(ValueError, match="'flex' is not accepted; it must be 'dense' with latents"):
        LanguageModel(model.config, attention_backend="flex")
