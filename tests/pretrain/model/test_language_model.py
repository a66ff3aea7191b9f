"""The language model: every variant and every position method, forward and backward."""

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy

from pretrain.model import presets
from pretrain.model.embeddings import smallest_length
from pretrain.model.language_model import LanguageModel
from tests.pretrain.model.test_positions import METHODS, VARIANTS, VOCABULARY, ids_of, tiny

CAUSAL = [name for name in VARIANTS if name.startswith("causal")]
MODELS = {name: (name, {}) for name in VARIANTS}
MODELS |= {"-".join(method.values()): ("baseline", method) for method in METHODS}
every_model = pytest.mark.parametrize("name", MODELS)
MASK_ID = VOCABULARY - 1


@every_model
def test_every_parameter_of_every_model_gets_a_finite_gradient(name):
    variant, method = MODELS[name]
    model = tiny(variant, **method).train()
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
        ("zero-clap without the padding of its vocabulary", 123_655_681),
    ],
)
def test_base_models_have_the_original_s_number_of_parameters(variant, count):
    variant, *published = variant.split(maxsplit=1)
    rows = 50263 if published else 50265
    config = presets.build("base", variant, rows, {})
    assert config.vocab_size == rows - (variant == "zero-clap")
    with torch.device("meta"):
        model = LanguageModel(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_places_asked_for_in_their_order(variant):
    model, ids = tiny(variant), ids_of(2, 9)
    everywhere = model(ids, None, torch.arange(18))
    some = torch.tensor([17, 0, 4])
    torch.testing.assert_close(model(ids, None, some), everywhere[some])


@every_model
def test_padding_does_not_change_what_real_tokens_get(name):
    """Nor does padding in front of them, where the ids of documents are whole numbers."""
    variant, method = MODELS[name]
    model, ids = tiny(variant, **method), ids_of(1, 9)
    alone = model.encoder(ids)[0]
    padded = torch.ones(2, 20, dtype=torch.int64)
    padded[0, :9], padded[1] = ids[0], ids_of(20, seed=1)
    real = torch.tensor([[9], [20]]) > torch.arange(20)
    features = model.encoder(padded, real)[0, :9]
    torch.testing.assert_close(features, alone, rtol=0, atol=1e-5)
    # and what stands in the padding is of no account
    assert torch.equal(model.encoder(padded.where(real, 7), real)[0, :9], features)
    if not model.config.latents:
        for shift in (0, 11):
            numbers = real.long().roll(shift, dims=1)
            features = model.encoder(padded.roll(shift, dims=1), numbers)[0, shift : shift + 9]
            torch.testing.assert_close(features, alone, rtol=0, atol=1e-5)


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
        expected = not any(kind in variant for kind in ("clap", "causal", "char"))
        assert bool((row == 0).all()) == expected, variant


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


@pytest.mark.parametrize("name", [name for name in MODELS if "perceiver" not in name])
def test_texts_that_share_a_row_are_read_as_if_alone(name):
    """Logits of each, and the gradient of their sum, are those of rows of their own."""
    variant, method = MODELS[name]
    model = tiny(variant, **method)
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["dense", "dense with dropout", "flex"])
@pytest.mark.parametrize("variant", CAUSAL)
def test_no_bit_of_a_causal_model_depends_on_what_a_token_must_not_see(
    variant, backend, packed, without_compiler
):
    """Later tokens, and other texts of the row."""
    torch.manual_seed(0)
    rate = 0.1 if "dropout" in backend else 0.0
    overrides = {"dropout": rate, "attention_dropout": rate}
    config = presets.build("tiny", variant, VOCABULARY, overrides)
    model = LanguageModel(config, attention_backend=backend.split()[0]).train()
    with torch.no_grad():
        for layer in model.encoder.layers:  # fresh weights hardly attend to anything
            layer.attention.query_key_value.weight *= 20
    length = 40
    ids = ids_of(2, length)
    texts = torch.ones_like(ids)
    if packed:
        texts[0, 9:], texts[0, 23:], texts[1, 30:] = 2, 3, 0
    places = torch.arange(2 * length)

    def logits(ids):
        torch.manual_seed(5)
        with torch.no_grad():
            found = model(ids, texts if packed else None, places)
        return found.view(2, length, VOCABULARY)

    plain = logits(ids)
    for cut in (16,) if backend == "flex" else (1, 9, 16, 22, 39):
        later = torch.arange(length) >= cut
        changed = logits(torch.where(later, (ids - 3) % 45 + 4, ids))
        assert torch.equal(changed[:, :cut], plain[:, :cut])
        assert not torch.equal(changed[:, cut:], plain[:, cut:])
    if packed:
        changed = torch.where(texts == 2, ids, (ids - 3) % 45 + 4)
        assert torch.equal(logits(changed)[0, 9:23], plain[0, 9:23])


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
    labels = ids.flatten().clamp(max=rows - 1)
    labels[::3] = -100
    loss = padded(ids, None, places, labels=labels)
    torch.testing.assert_close(loss, cross_entropy(logits, labels, reduction="sum"))
    loss.backward()
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
        loss = model(ids, ids != 1, places, labels=labels)
        assert loss.dtype == torch.float32
        loss.backward()
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


@pytest.mark.parametrize("causal", [False, True])
def test_a_local_layer_sees_half_a_window_on_each_side(causal):
    """By the gradient of one token's features with respect to all embeddings."""
    overrides = {"num_layers": 1, "local_window": 6, "causal": causal}
    model = tiny("modern", **overrides, global_every=1)
    seen = {}
    for every in (1, 2):
        config = dataclasses.replace(model.config, num_layers=every, global_every=every)
        # With two layers, the second is local and the first is made to pass its input on.
        built = LanguageModel(config).eval()
        if every == 2:
            with torch.no_grad():
                built.encoder.layers[0].attention.output.weight.zero_()
                built.encoder.layers[0].contract.weight.zero_()
        table = built.encoder.embeddings.tokens.weight
        built.encoder(torch.arange(4, 24)[None])[0, 10, 0].backward()
        seen[every] = [place for place in range(20) if table.grad[4 + place].abs().sum() > 1e-8]
    last = 10 if causal else 13
    assert seen == {1: list(range(11 if causal else 20)), 2: list(range(7, last + 1))}
