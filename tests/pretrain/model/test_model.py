"""The model: parity with the original code, and what its parts promise."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from pretrain.model import presets
from pretrain.model.attention import attention_bias
from pretrain.model.config import ModelConfig
from pretrain.model.embeddings import smallest_length
from pretrain.model.language_model import LanguageModel
from pretrain.model.positions import SinusoidalPositions, alibi_bias, alibi_slopes

CPU = torch.device("cpu")
VARIANTS = sorted(presets.VARIANTS)
VOCABULARY = 50
MASK_ID = VOCABULARY - 1


def tiny(variant, seed=0, **overrides):
    torch.manual_seed(seed)
    return LanguageModel(presets.build("tiny", variant, VOCABULARY, overrides)).eval()


def ids_of(*shape, seed=0):
    return torch.randint(4, MASK_ID, shape, generator=torch.Generator().manual_seed(seed))


def test_alibi_tables_and_slopes_are_the_original_s(golden):
    tables = load_file(golden / "alibi_tables.safetensors")
    for heads in (4, 6, 8, 12, 16, 20):
        torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), tables[f"slopes_{heads}"])
        for kind, name in (("offset", "asym"), ("symmetric", "sym")):
            torch.testing.assert_close(alibi_bias(heads, 8, kind, CPU), tables[f"{name}_{heads}"])


@pytest.mark.parametrize(("name", "size"), [("d64_130", 64), ("d768_16", 768)])
def test_sinusoidal_tables_are_the_original_s(name, size, golden):
    table = load_file(golden / "sinusoidal_tables.safetensors")[name]
    # Their table starts at the padding's row; the first token has row 2.
    ours = SinusoidalPositions(size)(torch.arange(len(table) - 2))
    torch.testing.assert_close(ours, table[2:], rtol=0, atol=2e-5)


# --- positions ----------------------------------------------------------------------------------


def test_alibi_with_offset_is_the_table_of_the_paper_s_code():
    distance = torch.tensor([[0, 0.5, 1.5, 2.5], [1, 0, 0.5, 1.5], [2, 1, 0, 0.5], [3, 2, 1, 0]])
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])
    assert torch.equal(alibi_bias(4, 4, "offset", CPU), -slopes[:, None, None] * distance)


def test_symmetric_alibi_counts_the_distance_alone():
    distance = torch.tensor([[0.0, 1, 2, 3], [1, 0, 1, 2], [2, 1, 0, 1], [3, 2, 1, 0]])
    bias = alibi_bias(4, 4, "symmetric", CPU)
    assert torch.equal(bias[0], -0.25 * distance)
    assert torch.equal(bias[3], -0.00390625 * distance)


def test_slopes_of_twelve_heads_are_eight_of_a_series_and_four_between():
    expected = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)]
    assert alibi_slopes(12) == pytest.approx(expected)
    assert alibi_slopes(16) == pytest.approx([2.0 ** (-n / 2) for n in range(1, 17)])
    assert alibi_slopes(1) == [2.0**-8]


def test_casting_the_model_to_bf16_does_not_coarsen_the_alibi_bias():
    """Law 7: rounded once, from exact fp32 distances; a bf16 buffer would know 256 of them."""
    model = tiny("alibi").to(torch.bfloat16)
    seen = []
    model.encoder.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    with torch.no_grad():
        model(ids_of(1, 600), None, torch.tensor([0]))
    exact = alibi_bias(4, 600, "offset", CPU)
    assert exact.dtype == torch.float32
    assert torch.equal(seen[0][0], exact.to(torch.bfloat16))
    positions = torch.arange(600, dtype=torch.float32)
    assert torch.equal(exact[0, 599], -0.25 * (599 - positions))


def test_inputs_beyond_the_learned_table_are_refused():
    for variant in ("baseline", "learned-clap"):
        model = tiny(variant)
        model(ids_of(1, 64), None, torch.tensor([63]))
        with pytest.raises(ValueError, match="65 tokens: learned positions end at 64"):
            model(ids_of(1, 65), None, torch.tensor([0]))


@pytest.mark.parametrize("variant", ["alibi", "zero-clap", "sinusoidal"])
def test_models_without_a_position_table_read_longer_inputs(variant):
    logits = tiny(variant)(ids_of(1, 200), None, torch.tensor([0, 199]))
    assert logits.shape == (2, tiny(variant).config.vocab_size)
    assert logits.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_s_place_matters_in_every_variant(variant):
    ids, last = ids_of(1, 12), torch.tensor([11])
    turned = torch.cat([ids[:, :11].flip(1), ids[:, 11:]], dim=1)

    def change(model):
        with torch.no_grad():
            for layer in model.encoder.layers:  # fresh weights hardly attend to anything
                layer.attention.query_key_value.weight *= 20
            return float((model(ids, None, last) - model(turned, None, last)).abs().max())

    bag_of_words = tiny(variant, position="none")
    assert change(bag_of_words) < 1e-5
    assert change(tiny(variant)) > 1e-3


# --- the whole ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_of_every_variant_gets_a_finite_gradient(variant):
    model = tiny(variant).train()
    ids = ids_of(3, 64)
    ids[:, ::7] = MASK_ID
    places = torch.arange(0, 3 * 64, 7)
    logits = model(ids, torch.ones_like(ids, dtype=torch.bool), places)
    assert logits.shape == (len(places), model.config.vocab_size)
    cross_entropy(logits, ids_of(len(places))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("variant", "count"),
    [
        ("baseline", 125_876_313),
        ("learned-clap", 125_232_385),
        ("alibi", 124_301_913),
        ("sinusoidal", 124_301_913),
        ("zero-clap", 123_657_217),
    ],
)
def test_base_models_have_the_original_s_number_of_parameters(variant, count):
    config = presets.build("base", variant, 50265, {})
    assert config.vocab_size == (50264 if variant == "zero-clap" else 50265)
    with torch.device("meta"):
        model = LanguageModel(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_the_published_zero_clap_s_rows_give_its_number_of_parameters():
    config = presets.build("base", "zero-clap", 50263, {})
    assert config.vocab_size == 50262
    with torch.device("meta"):
        model = LanguageModel(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 123_655_681


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_places_asked_for_in_their_order(variant):
    model, ids = tiny(variant), ids_of(2, 9)
    everywhere = model(ids, None, torch.arange(18))
    some = torch.tensor([17, 0, 4])
    torch.testing.assert_close(model(ids, None, some), everywhere[some])


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_does_not_change_what_real_tokens_get(variant):
    model = tiny(variant)
    ids = ids_of(1, 9)
    alone = model.encoder(ids)
    padded = torch.ones(2, 20, dtype=torch.int64)
    padded[0, :9], padded[1] = ids[0], ids_of(20, seed=1)
    features = model.encoder(padded, torch.tensor([[9], [20]]) > torch.arange(20))
    torch.testing.assert_close(features[0, :9], alone[0], rtol=0, atol=1e-5)
    # and what stands in the padding is of no account
    padded[0, 9:] = 7
    again = model.encoder(padded, torch.tensor([[9], [20]]) > torch.arange(20))
    assert torch.equal(again[0, :9], features[0, :9])


def test_a_mask_without_a_row_enters_as_the_zero_vector():
    model = tiny("zero-clap")
    assert model.config.vocab_size == MASK_ID
    ids = ids_of(1, 6)
    ids[0, 2] = MASK_ID
    vectors = model.encoder.embeddings(ids, None)
    assert torch.equal(vectors[0, 2], torch.zeros(32))
    assert (vectors[0, [0, 1, 3, 4, 5]].norm(dim=-1) - 32**0.5).abs().max() < 1e-4
    ids[0, 2] = MASK_ID + 5
    assert torch.equal(model.encoder.embeddings(ids, None), vectors)


def test_clap_logits_are_beta_times_features_on_unit_rows():
    model = tiny("zero-clap")
    with torch.no_grad():
        model.head.beta.fill_(-2.5)
        model.encoder.embeddings.tokens.weight[9] *= 100
    ids, places = ids_of(1, 5), torch.arange(5)
    rows = model.encoder.embeddings.tokens.weight
    expected = -2.5 * model.encoder(ids)[0] @ (rows / rows.norm(dim=-1, keepdim=True)).T
    torch.testing.assert_close(model(ids, None, places), expected)


def test_clap_s_logits_and_gradients_are_the_same_for_few_features_and_for_many():
    """More features than dimensions are multiplied by a table that was divided beforehand."""
    head = tiny("zero-clap").head
    features, table = torch.randn(40, 32), torch.randn(VOCABULARY + 7, 32)

    def gradient(parts):
        given = [x.clone().requires_grad_() for x in (features, table)]
        logits = torch.cat([head(part, given[1]) for part in given[0].split(parts)])
        weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
        return logits, *torch.autograd.grad((logits * weights).sum(), [*given, head.beta])

    for many, few in zip(gradient(40), gradient(20), strict=True):
        torch.testing.assert_close(many, few, rtol=1e-5, atol=1e-5)


def test_only_models_that_can_have_a_zero_padding_row():
    for variant in VARIANTS:
        row = tiny(variant).encoder.embeddings.tokens.weight[1]
        assert bool((row == 0).all()) == ("clap" not in variant), variant


def test_initial_weights_are_bert_s_and_follow_the_generator():
    torch.manual_seed(3)
    config = presets.build("small", "baseline", 500, {})
    weights = LanguageModel(config).state_dict()
    for name, tensor in weights.items():
        if name.endswith("bias"):
            assert (tensor == 0).all(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name
        else:
            assert float(tensor.std()) == pytest.approx(0.02, rel=0.05), name
    torch.manual_seed(3)
    again = LanguageModel(config).state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_texts_that_share_a_row_are_read_as_if_alone(variant):
    """Logits of each, and the gradient of their sum, are those of rows of their own."""
    model = tiny(variant)
    texts = [ids_of(length, seed=length) for length in (5, 9, 1, 7)]
    texts[1][3] = MASK_ID
    row = torch.cat([*texts, torch.full((4,), 1)])[None]
    numbers = torch.tensor([[1] * 5 + [2] * 9 + [3] + [4] * 7 + [0] * 4])
    together = model(row, numbers, torch.arange(22))
    alone = torch.cat([model(text[None], None, torch.arange(len(text))) for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)
    gradients = [
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(x.square().sum(), [*model.parameters()])]
        )
        for x in (together, alone)
    ]
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_padded_token_table_shows_nowhere(variant):
    """Same draw, same logits; the rows of no token are zero, get no gradient, and stay so."""
    plain = tiny(variant)
    torch.manual_seed(0)
    padded = LanguageModel(plain.config, vocabulary_multiple=64).eval()
    table = padded.encoder.embeddings.tokens.weight
    rows = plain.config.vocab_size
    assert len(table) == 64 * -(-rows // 64)
    assert not table[rows:].any()
    for (name, ours), theirs in zip(padded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours[: len(theirs)], theirs), name
    with torch.no_grad():
        for model in (plain, padded):
            for bias in (p for name, p in model.head.named_parameters() if name == "bias"):
                bias.copy_(torch.linspace(-1, 1, rows))
    ids = ids_of(2, 20)
    ids[0, 3] = MASK_ID
    places = torch.arange(40)
    logits = padded(ids, None, places)
    assert logits.shape == (40, rows)
    torch.testing.assert_close(logits, plain(ids, None, places), rtol=0, atol=1e-6)
    cross_entropy(logits, ids.flatten().clamp(max=rows - 1)).backward()
    assert not table.grad[rows:].any()


@pytest.mark.parametrize("count", [20, 40], ids=["few places", "many places"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_rows_are_zero_and_without_gradient_in_half_precision(variant, dtype, count):
    """The gradients of all other weights are those of fp32 up to rounding."""
    ids, labels = ids_of(2, 20), ids_of(40, seed=1)[:count]
    ids[0, 3], ids[1, 15:] = MASK_ID, 1
    places = torch.arange(count)
    gradients = []
    for kind in (torch.float32, dtype):
        torch.manual_seed(0)
        config = presets.build("tiny", variant, VOCABULARY, {})
        model = LanguageModel(config, vocabulary_multiple=128).eval().to(kind)
        logits = model(ids, ids != 1, places)
        cross_entropy(logits.float(), labels, reduction="sum").backward()
        gradients.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
        table = model.encoder.embeddings.tokens.weight
        assert not table.grad[config.vocab_size :].any()
        assert not table[config.vocab_size :].any()
    exact, rounded = gradients
    assert float((rounded - exact).norm()) < 0.05 * float(exact.norm())


def test_a_zero_padding_row_that_is_normalised_stays_zero_in_fp16():
    model = tiny("baseline", normalize_embeddings=True).half()
    ids = ids_of(2, 9)
    ids[1, 4:] = 1
    assert not model.encoder.embeddings.tokens.weight[1].any()
    logits = model(ids, ids != 1, torch.tensor([0, 10]))
    logits.float().sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_vectors_are_divided_by_no_less_than_torch_s_own_bound_but_in_fp16(dtype):
    assert smallest_length(dtype) == 1e-12
    assert torch.tensor(smallest_length(torch.float16), dtype=torch.float16) > 0


def test_bias_of_padding_alone_broadcasts_over_heads_and_queries():
    config = presets.build("tiny", "baseline", VOCABULARY, {})
    mask = torch.tensor([[True, True, False]])
    bias = attention_bias(config, 3, mask, torch.float32, CPU)
    assert bias.tolist() == [[[[0.0, 0.0, torch.finfo(torch.float32).min]]]]
    assert attention_bias(config, 3, None, torch.float32, CPU) is None


# --- the record ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", sorted(presets.SIZES))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_named_model_survives_its_json(size, variant):
    config = presets.build(size, variant, 1000, {})
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_record_may_lack_fields_with_a_default_and_no_others():
    """An earlier version did not write a field that was added since."""
    config = presets.build("base", "zero-clap", 1000, {})
    for name, value in ModelConfig(vocab_size=1).to_dict().items():
        values = config.to_dict()
        values.pop(name)
        if name == "vocab_size":
            with pytest.raises(ValueError, match=r"missing \['vocab_size'\], unknown \[\]"):
                ModelConfig.from_dict(values)
        else:
            assert ModelConfig.from_dict(values) == dataclasses.replace(config, **{name: value})


def test_a_record_with_an_unknown_field_is_refused_by_its_name():
    values = {**ModelConfig(vocab_size=10).to_dict(), "alibbi": "offset"}
    with pytest.raises(ValueError, match=r"model config: missing \[\], unknown \['alibbi'\]"):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("position", "rotary", "learned, sinusoidal, alibi, none"),
        ("alibi", "causal", "offset, symmetric"),
        ("head", "linear", "roberta, clap"),
        ("num_layers", 0, "positive"),
        ("intermediate_size", 0, "positive"),
        ("dropout", 1.0, r"in \[0, 1\)"),
        ("attention_dropout", -0.1, r"in \[0, 1\)"),
        ("num_heads", 5, "a multiple of 5 heads"),
        # A wrong kind must not surface later as a TypeError, or as a truth value.
        ("num_layers", "two", "whole number"),
        ("num_layers", 2.5, "whole number"),
        ("hidden_size", True, "whole number"),
        ("embedding_norm", "none", "true or false"),
        ("normalize_embeddings", 1.0, "true or false"),
        ("dropout", "much", "number"),
        ("initial_beta", None, "number"),
        ("position", 3, "one of learned"),
    ],
)
def test_a_field_out_of_its_choices_or_kind_is_refused_by_name(field, value, accepted):
    with pytest.raises(ValueError, match=accepted) as caught:
        dataclasses.replace(ModelConfig(vocab_size=10), **{field: value})
    assert "model." in str(caught.value)
    assert repr(value) in str(caught.value) or field == "num_heads"


def test_unknown_names_of_models_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'huge' is not one of base, large"):
        presets.build("huge", "baseline", 10, {})
    with pytest.raises(ValueError, match="'clap' is not one of baseline"):
        presets.build("tiny", "clap", 10, {})
