"""Position methods: every entry of the table, and the numbers of each method."""

import math

import pytest
import torch
from torch import nn

from pretrain.model import config as config_module
from pretrain.model import positions, presets
from pretrain.model.config import CHOICES, POSITION_METHODS, ModelConfig, PositionMethod
from pretrain.model.language_model import LanguageModel
from pretrain.model.positions import Rotary, SinusoidalPositions, token_positions

VARIANTS = sorted(presets.VARIANTS)
VOCABULARY = 50
METHODS = [{"position": name} for name in POSITION_METHODS if name != "alibi"]
METHODS += [
    {"position": "alibi", "alibi": shape, "alibi_slopes": slopes}
    for shape in CHOICES["alibi"]
    for slopes in CHOICES["alibi_slopes"]
]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join(m.values()))


def tiny(variant, seed=0, **overrides):
    torch.manual_seed(seed)
    return LanguageModel(presets.build("tiny", variant, VOCABULARY, overrides)).eval()


def ids_of(*shape, seed=0):
    return torch.randint(4, VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(seed))


# --- every method of the table ------------------------------------------------------------------


@every_method
def test_inputs_may_be_as_long_as_the_record_says(method):
    model = tiny("baseline", **method)
    limit = model.config.longest_input
    assert limit == (64 if POSITION_METHODS[method["position"]].bounded else None)
    assert model.encoder(ids_of(1, limit or 200)).isfinite().all()
    if limit:
        with pytest.raises(ValueError, match="65 tokens: learned positions end at 64"):
            model.encoder(ids_of(1, 65))


def test_a_new_method_is_one_entry_whose_classes_act_in_three_places(monkeypatch):
    """The trained bias is a parameter of the encoder, as T5's is."""

    class Ramp(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.size = config.hidden_size

        def forward(self, places):
            return 0.01 * places[..., None].expand(*places.shape, self.size)

    class Turn(nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, places):
            angles = places.float().view(-1, places.shape[-1], 1, 1)
            return lambda x: torch.cat([x, x.roll(1, -1)], -1)[..., : x.shape[-1]] * angles.cos()

    class Trained(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0, 1, config.num_heads))

        def forward(self, device, exact):
            return lambda head, query, key: self.weight[head] * (key > query)

    for one in (Ramp, Turn, Trained):
        monkeypatch.setattr(positions, one.__name__, one, raising=False)
    table = {**POSITION_METHODS, "toy": PositionMethod("Ramp", "Turn", "Trained")}
    monkeypatch.setattr(config_module, "POSITION_METHODS", table)
    model = tiny("baseline", position="toy").train()
    document_ids = torch.tensor([[1] * 5 + [2] * 9 + [0] * 4])
    logits = model(ids_of(1, 18), document_ids, torch.arange(14))
    logits.square().sum().backward()
    assert model.encoder.score_bias.weight.grad.abs().sum() > 0
    model.eval()
    alone = model.encoder(ids_of(1, 18)[:, 5:14])
    together = model.encoder(ids_of(1, 18), document_ids)[:, 5:14]
    torch.testing.assert_close(together, alone, rtol=0, atol=5e-6)


# --- the numbers of each method -----------------------------------------------------------------


def test_sinusoidal_vectors_may_have_one_pair_of_numbers():
    found = SinusoidalPositions(ModelConfig(VOCABULARY, 2, num_heads=1))(torch.arange(3))
    angles = torch.arange(2.0, 5.0)
    torch.testing.assert_close(found, torch.stack([angles.sin(), angles.cos()], dim=1))


def test_positions_are_counted_from_the_start_of_each_document():
    document_ids = torch.tensor([[1, 1, 1, 2, 2, 0], [5, 3, 3, 3, 3, 3]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    assert token_positions(document_ids, document_ids).tolist() == expected
    for one_document in (None, document_ids > 0):
        assert token_positions(one_document, document_ids).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [torch.arange(40), torch.arange(80).view(2, 40) % 23])
def test_a_rotation_has_the_bits_of_even_and_odd_numbers_apart(places, dtype):
    """In both directions: the formula of Su et al. 2021 (34), which takes several kernels."""

    def apart(x):
        steps = torch.exp(torch.arange(0, 16, 2) * -(math.log(10000.0) / 16))
        angles = (places.float()[..., None] * steps)[..., None, :]
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        cosine, sine = angles.cos(), angles.sin()
        turned = even * cosine - odd * sine, odd * cosine + even * sine
        return torch.stack(turned, dim=-1).flatten(-2).to(dtype)

    rotary = Rotary(ModelConfig(50, 48, num_heads=3))(places)
    results = []
    for rotate in (rotary, apart):
        x = torch.randn(2, 40, 3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        turned = rotate(x.requires_grad_())
        turned.backward(torch.linspace(-3, 5, x.numel(), dtype=dtype).view_as(x))
        results.append((turned, x.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
