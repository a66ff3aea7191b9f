"""Position methods: every entry of the table, and the numbers of each method."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pretrain.model import config as config_module
from pretrain.model import positions, presets
from pretrain.model.alibi import Alibi, alibi_slopes
from pretrain.model.config import CHOICES, POSITION_METHODS, ModelConfig, PositionMethod
from pretrain.model.language_model import LanguageModel
from pretrain.model.positions import SinusoidalPositions, token_positions

CPU = torch.device("cpu")
VARIANTS = sorted(presets.VARIANTS)
VOCABULARY = 50
METHODS = [(name, "offset") for name in POSITION_METHODS]
METHODS += [("alibi", kind) for kind in CHOICES["alibi"] if kind != "offset"]
every_method = pytest.mark.parametrize(("position", "kind"), METHODS)


def tiny(variant, seed=0, **overrides):
    torch.manual_seed(seed)
    return LanguageModel(presets.build("tiny", variant, VOCABULARY, overrides)).eval()


def ids_of(*shape, seed=0):
    return torch.randint(4, VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(seed))


def alibi(heads, length, kind):
    """The bias [H, T, T] of ALiBi."""
    config = ModelConfig(VOCABULARY, hidden_size=8 * heads, num_heads=heads, alibi=kind)
    index = torch.arange(length)
    return Alibi(config)(CPU)(torch.arange(heads)[:, None, None], index[:, None], index)


def sinusoidal(size, length):
    return SinusoidalPositions(ModelConfig(VOCABULARY, size, num_heads=1))(torch.arange(length))


# --- every method of the table ------------------------------------------------------------------


@every_method
def test_every_method_runs_forward_and_backward(position, kind):
    model = tiny("baseline", position=position, alibi=kind).train()
    logits = model(ids_of(2, 64), torch.ones(2, 64, dtype=torch.bool), torch.arange(0, 128, 5))
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@every_method
def test_padding_does_not_change_the_features_of_real_tokens(position, kind):
    model = tiny("baseline", position=position, alibi=kind)
    ids = ids_of(1, 9)
    alone = model.encoder(ids)
    padded = torch.ones(2, 20, dtype=torch.int64)
    padded[0, :9], padded[1] = ids[0], ids_of(20, seed=1)
    for document_ids in (padded != 1, (padded != 1).long()):
        features = model.encoder(padded, document_ids)
        torch.testing.assert_close(features[0, :9], alone[0], rtol=0, atol=1e-5)


@every_method
def test_documents_in_one_row_are_read_as_if_alone(position, kind):
    model = tiny("baseline", position=position, alibi=kind)
    documents = [ids_of(length, seed=length) for length in (5, 9, 1, 7)]
    row = torch.cat([*documents, torch.full((4,), 1)])[None]
    document_ids = torch.tensor([[1] * 5 + [2] * 9 + [3] + [4] * 7 + [0] * 4])
    together = model.encoder(row, document_ids)[0, :22]
    alone = torch.cat([model.encoder(document[None])[0] for document in documents])
    torch.testing.assert_close(together, alone, rtol=0, atol=5e-6)


@every_method
def test_inputs_may_be_as_long_as_the_record_says(position, kind):
    model = tiny("baseline", position=position, alibi=kind)
    limit = model.config.longest_input
    assert limit == (64 if POSITION_METHODS[position].bounded else None)
    assert model.encoder(ids_of(1, limit or 200)).isfinite().all()
    if limit:
        with pytest.raises(ValueError, match="65 tokens: learned positions end at 64"):
            model.encoder(ids_of(1, 65))


@every_method
def test_the_order_of_tokens_matters_but_without_positions(position, kind):
    model = tiny("baseline", position=position, alibi=kind)
    ids, last = ids_of(1, 12), torch.tensor([11])
    turned = torch.cat([ids[:, :11].flip(1), ids[:, 11:]], dim=1)
    with torch.no_grad():
        for layer in model.encoder.layers:  # fresh weights hardly attend to anything
            layer.attention.query_key_value.weight *= 20
        if position == "t5-bias":
            model.encoder.score_bias.table.weight *= 50
        change = float((model(ids, None, last) - model(turned, None, last)).abs().max())
    assert change < 1e-5 if position == "none" else change > 1e-3


def test_hidden_sizes_that_a_method_cannot_have_are_refused():
    with pytest.raises(ValueError, match=r"hidden_size: 9 .* 6 \(3 heads, sinusoidal positions\)"):
        ModelConfig(VOCABULARY, hidden_size=9, num_heads=3, position="sinusoidal")
    ModelConfig(VOCABULARY, hidden_size=9, num_heads=3)


def test_a_new_method_is_one_entry_whose_classes_act_in_three_places(monkeypatch):
    """The trained bias is a parameter of the encoder, as T5's will be."""

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
            angles = places.float().view(-1, places.shape[-1], 1, 1, 1)
            return lambda x: torch.cat([x, x.roll(1, -1)], -1)[..., : x.shape[-1]] * angles.cos()

    class Trained(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0, 1, config.num_heads))

        def forward(self, device):
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


def test_alibi_tables_and_slopes_are_those_of_fairseq(golden):
    tables = load_file(golden / "alibi_tables.safetensors")
    for heads in (4, 6, 8, 12, 16, 20):
        torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), tables[f"slopes_{heads}"])
        for kind, name in (("offset", "asym"), ("symmetric", "sym")):
            torch.testing.assert_close(alibi(heads, 8, kind), tables[f"{name}_{heads}"])


@pytest.mark.parametrize(("name", "size"), [("d64_130", 64), ("d768_16", 768)])
def test_sinusoidal_tables_are_those_of_fairseq(name, size, golden):
    table = load_file(golden / "sinusoidal_tables.safetensors")[name]
    # Their table starts at the row of the padding; the first token has row 2.
    torch.testing.assert_close(sinusoidal(size, len(table) - 2), table[2:], rtol=0, atol=2e-5)


def test_alibi_with_offset_is_the_table_of_eify_fairseq():
    distance = torch.tensor([[0, 0.5, 1.5, 2.5], [1, 0, 0.5, 1.5], [2, 1, 0, 0.5], [3, 2, 1, 0]])
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])
    assert torch.equal(alibi(4, 4, "offset"), -slopes[:, None, None] * distance)


def test_symmetric_alibi_depends_on_the_distance_only():
    distance = torch.tensor([[0.0, 1, 2, 3], [1, 0, 1, 2], [2, 1, 0, 1], [3, 2, 1, 0]])
    bias = alibi(4, 4, "symmetric")
    assert torch.equal(bias[0], -0.25 * distance)
    assert torch.equal(bias[3], -0.00390625 * distance)


def test_slopes_of_twelve_heads_are_eight_of_a_series_and_four_between():
    expected = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)]
    assert alibi_slopes(12) == pytest.approx(expected)
    assert alibi_slopes(16) == pytest.approx([2.0 ** (-n / 2) for n in range(1, 17)])
    assert alibi_slopes(1) == [2.0**-8]


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_casting_the_model_to_bf16_does_not_coarsen_the_alibi_bias(default, monkeypatch):
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


def test_positions_are_counted_from_the_start_of_each_document():
    document_ids = torch.tensor([[1, 1, 1, 2, 2, 0], [5, 3, 3, 3, 3, 3]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    assert token_positions(document_ids, document_ids).tolist() == expected
    for one_document in (None, document_ids > 0):
        assert token_positions(one_document, document_ids).tolist() == [0, 1, 2, 3, 4, 5]
