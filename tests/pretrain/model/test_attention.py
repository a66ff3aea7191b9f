"""Every way of computing attention computes the same, gradients included."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import flex_attention as library

from pretrain.model import encoder, flex, presets
from pretrain.model.attention import AttentionContext, attend, dense_bias
from pretrain.model.biases import alibi_slopes, t5_bucket
from pretrain.model.config import CHOICES, POSITION_METHODS, ModelConfig
from pretrain.model.language_model import LanguageModel
from pretrain.model.layers import checkpoint_activations, compile_layers
from pretrain.model.positions import position_module
from tests.pretrain.builders import pairwise
from tests.pretrain.memory import LiveBytes

# What FlexAttention without a compiler does with a trained bias.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
CPU = torch.device("cpu")
POSITIONS = [(name, "offset") for name in POSITION_METHODS]
POSITIONS += [("alibi", kind) for kind in CHOICES["alibi"] if kind != "offset"]
WITH_SCORES = [each for each in POSITIONS if POSITION_METHODS[each[0]].score_bias]
MASKS = ("none", "padding", "documents")
both_directions = pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])


def config_of(position, kind, heads=4, causal=False, window=0):
    size = {"vocab_size": 50, "hidden_size": 8 * heads, "num_heads": heads}
    return ModelConfig(**size, position=position, alibi=kind, causal=causal, local_window=window)


def scores_of(config, exact=False):
    """The score bias of the model's position method, as a function; None where it has none."""
    torch.manual_seed(0)
    module = position_module(config.method.score_bias, config)
    return None if module is None else module(CPU, exact)


def bias_of(config, length, document_ids, dtype=torch.float32, in_parts=False):
    """The bias of the dense back end for two rows."""
    x = torch.empty(2, length, 1, dtype=dtype)
    scores = scores_of(config, exact=True)
    window = config.local_window
    return dense_bias(scores, document_ids, config.num_heads, x, in_parts, config.causal, window)


def masks(length):
    """None; padding; documents and padding, with borders that are not borders of tiles."""
    real = torch.tensor([[length], [length - 57]]) > torch.arange(length)
    documents = torch.zeros(2, length, dtype=torch.int64)
    for number, (first, end) in enumerate([(0, 3), (3, 150), (150, length - 40)]):
        documents[0, first:end] = number + 1
    documents[1, :length] = 1
    return {"none": None, "padding": real, "documents": documents}


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def both(config, length, mask, dtype):
    """Output and gradient with respect to query, key and value, of dense and of flex."""
    results = []
    for backend in ("dense", "flex"):
        qkv = drawn(2, length, 3, config.num_heads, 8, dtype=dtype).requires_grad_()
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if backend == "dense":
            bias = bias_of(config, length, mask, dtype)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        else:
            scores, window = scores_of(config), config.local_window
            bias = flex.flex_bias(scores, mask, length, config.causal, window)
            assert bias is not None
            out = flex.flex_attend(query, key, value, bias)
        gradient = drawn(*out.shape, seed=1, dtype=dtype)
        if mask is not None and mask.dtype == torch.bool:
            out, gradient = (x * mask[:, None, :, None] for x in (out, gradient))
        out.backward(gradient)
        results.append((out.detach().float(), qkv.grad.float()))
    return results


@pytest.mark.parametrize(
    ("method", "mask", "causal", "window", "dtype"),
    [
        case
        for case in pairwise(
            POSITIONS, MASKS, [False, True], [0, 150], [torch.float32, torch.bfloat16]
        )
        if case[0] in WITH_SCORES or case[1:4] != ("none", False, 0)
    ],
    ids=str,
)
def test_flex_is_dense_in_output_and_gradient(
    method, mask, causal, window, dtype, without_compiler
):
    position, kind = method
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    config = config_of(position, kind, causal=causal, window=window)
    results = both(config, 384, masks(384)[mask], dtype)
    for dense, ours in zip(*results, strict=True):
        assert float((ours - dense).norm()) < tolerance * float(dense.norm())


@pytest.mark.parametrize(
    ("variant", "length", "mask"),
    pairwise(
        (
            *("zero-clap-unscaled-no-dropout", "alibi-clap", "baseline", "causal-rotary"),
            *("causal-t5-bias", "modern"),
        ),
        (200, 300),
        MASKS,
    ),
)
def test_whole_models_agree_on_lengths_that_are_no_whole_number_of_blocks(
    variant, length, mask, without_compiler
):
    overrides = {"dropout": 0.0, "attention_dropout": 0.0, "max_positions": 300}
    config = presets.build("tiny", variant, 50, overrides)
    ids = torch.randint(4, 49, (2, length), generator=torch.Generator().manual_seed(1))
    places = torch.arange(0, 2 * length - 60, 7)
    results = []
    for backend in ("dense", "flex"):
        torch.manual_seed(0)
        model = LanguageModel(config, attention_backend=backend)
        logits = model(ids, masks(length)[mask], places)
        logits.square().sum().backward()
        # A trained bias gets its gradient from the compiled kernel only.
        named = [(n, p) for n, p in model.named_parameters() if "score_bias" not in n]
        gradient = torch.cat([parameter.grad.flatten() for _, parameter in named])
        results.append((logits.detach(), gradient))
        features = model.encoder(ids, masks(length)[mask])
        assert features.shape == (2, length, config.hidden_size)
        assert model.encoder.hidden_states(ids)[0].shape == features.shape
    for dense, ours in zip(*results, strict=True):
        assert float((ours - dense).norm()) < 1e-5 * float(dense.norm())


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_dropout_of_attention_is_a_setting_of_its_own(rate):
    overrides = {"dropout": 0.5 - rate, "attention_dropout": rate}
    layer = LanguageModel(presets.build("tiny", "baseline", 50, overrides)).encoder.layers[0]
    x = drawn(2, 9, 32)
    attention = [layer.attention(x, AttentionContext()) for _ in range(2)]
    assert torch.equal(*attention) == (rate == 0.0)
    assert torch.equal(layer._feed_forward(x), layer._feed_forward(x)) == (rate > 0.0)


@pytest.mark.parametrize("backend", ["dense", "flex"])
def test_a_row_of_padding_alone_makes_no_nan(backend, without_compiler):
    config = presets.build("tiny", "alibi-clap", 50, {})
    torch.manual_seed(0)
    model = LanguageModel(config, attention_backend=backend)
    mask = torch.tensor([[True], [False]]).expand(2, 30)
    logits = model(torch.full((2, 30), 7), mask, torch.arange(60))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("position", "kind"), WITH_SCORES)
def test_flex_adds_the_same_fp32_numbers_as_dense_but_for_a_constant_of_each_head(position, kind):
    """Law 7: one function per bias, in fp32 whatever the dtype of the scores."""
    config = config_of(position, kind, heads=12)
    score_mod = flex.flex_bias(scores_of(config), None, 512).score_mod
    places, head = torch.arange(512), torch.arange(12)[:, None, None]
    zero = torch.zeros(12, 512, 512, dtype=torch.bfloat16)
    added = score_mod(zero, None, head, places[:, None], places)
    assert added.dtype == torch.float32
    expected = bias_of(config, 512, None)[0]
    if (position, kind) == ("alibi", "offset"):
        expected = expected - 0.25 * torch.tensor(alibi_slopes(12))[:, None, None]
        torch.testing.assert_close(added, expected, rtol=1e-6, atol=0)
    else:
        assert torch.equal(added, expected)


@pytest.mark.parametrize(
    ("mask", "causal", "window"),
    [*itertools.product(MASKS, [False, True], [0, 2, 254, 256, 510, 512])][1:],
)
def test_the_block_mask_is_torch_s_own_and_no_block_is_kept_without_need(mask, causal, window):
    ours = flex.flex_bias(None, masks(640)[mask], 640, causal, window).block_mask
    rows = ours.kv_num_blocks.shape[0]  # one where all rows have the same mask
    theirs = library.create_block_mask(ours.mask_mod, rows, None, 640, 640, device="cpu")
    assert ours.sparsity() == theirs.sparsity()
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("document_ids", [None, "bool"])
def test_a_causal_block_mask_is_on_the_device_of_the_scores(document_ids):
    config = presets.build("tiny", "causal-alibi", 50, {"attention_dropout": 0.0})
    with torch.device("meta"):
        model = LanguageModel(config, attention_backend="flex")
        ids = torch.zeros(2, 256, dtype=torch.int64)
        mask = None if document_ids is None else torch.ones(2, 256, dtype=torch.bool)
    bias = model.encoder.embed(ids, mask)[1].bias
    assert bias.block_mask.kv_num_blocks.device.type == "meta"


def test_texts_in_any_order_of_numbers_see_themselves_alone(without_compiler):
    numbers = torch.tensor([[3] * 100 + [1] * 100 + [0] * 20 + [2] * 100 + [3] * 64])
    results = both(config_of("alibi", "offset"), 384, numbers.expand(2, -1), torch.float32)
    for dense, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=2e-5)


def test_a_model_without_bias_or_padding_takes_torch_s_own_kernels():
    assert flex.flex_bias(None, None, 256) is None


@pytest.mark.slow  # compiles C++
@pytest.mark.parametrize("layers", [False, True])
def test_the_compiled_forward_pass_agrees_and_is_compiled_once_for_all_batches(layers, run_ranks):
    """The kernel alone, or whole layers: then one of them for all."""
    config = presets.build("tiny", "alibi-clap", 50, {"num_layers": 4})
    ids = torch.randint(4, 49, (2, 200), generator=torch.Generator().manual_seed(1))
    places = torch.arange(0, 400, 7)

    def work():
        models = []
        for backend in ("dense", "flex"):
            torch.manual_seed(0)
            models.append(LanguageModel(config, attention_backend=backend).eval())
        if layers:
            compile_layers(models[1])
        compiled = []
        for shift in range(3):
            texts = masks(200)["documents"].roll(shift, dims=1)
            with torch.no_grad():
                dense, ours = (model(ids, texts, places) for model in models)
            torch.testing.assert_close(ours, dense, rtol=0, atol=2e-5)
            compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return compiled

    # The kernel; or what follows the lookups, a layer, the last one at its masked places, the head.
    (compiled,) = run_ranks(1, work)
    assert compiled == [4 if layers else 1] * 3


@pytest.mark.slow  # compiles C++
def test_compiled_layers_have_the_same_gradients_and_names(run_ranks):
    """Also where they are computed twice; those of latents are in engine/test_engine.py."""
    config = presets.build("tiny", "modern", 50, {"num_layers": 3, "head": "clap"})
    ids = torch.randint(4, 49, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = masks(100)["padding"][:, 60:]
    labels = ids.flatten()[::3].clone()
    labels[5] = -100

    def work():
        results = []
        for compiled in (False, True):
            torch.manual_seed(0)
            model = LanguageModel(config, vocabulary_multiple=64)
            names = [*model.state_dict()]
            if compiled:
                compile_layers(model)
                checkpoint_activations(model)
            assert [*model.state_dict()] == names
            loss = model(ids, mask, torch.arange(0, 80, 3), labels=labels)
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters())])
        for plain, ours in zip(*results, strict=True):
            assert float((ours - plain).norm()) <= 1e-5 * float(plain.norm())
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    # As above, but the windows of "modern" differ: two kinds of layers before the last.
    assert run_ranks(1, work) == [5]


@pytest.mark.parametrize(
    ("backend", "dropout", "message"),
    [
        ("flax", 0.0, "'flax' is not accepted; it must be one of dense, flex"),
        ("flex", 0.1, "'flex' .* must be 'dense' with attention_dropout 0.1; 'flex'"),
    ],
)
def test_an_impossible_backend_is_refused(backend, dropout, message):
    config = presets.build("tiny", "alibi", 50, {"attention_dropout": dropout})
    with pytest.raises(ValueError, match=message):
        LanguageModel(config, attention_backend=backend)


# --- the bias of `dense` ------------------------------------------------------------------------


def bias_by_formula(config, length):
    """The position bias in fp32, [1, H, T, T], or [1, 1, 1, 1] where there is none."""
    heads = config.num_heads
    ahead = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    if config.position == "t5-bias":
        torch.manual_seed(0)
        table = position_module("T5Bias", config).table.weight.detach()
        buckets = [t5_bucket(number, config.causal) for number in range(-length, length)]
        return table[torch.tensor(buckets)[ahead + length]].permute(2, 0, 1)[None]
    if config.position != "alibi":
        return torch.zeros(1, 1, 1, 1)
    slopes = torch.tensor(alibi_slopes(heads))[:, None, None]
    if config.alibi == "one-sided":
        slopes = torch.tensor(alibi_slopes(heads // 2) * 2)[:, None, None]
        unseen = torch.cat([ahead.expand(heads // 2, -1, -1), -ahead.expand(heads // 2, -1, -1)])
        return torch.where(unseen > 0, -3e4, -slopes * ahead.abs())[None]
    if config.alibi == "by-direction":
        return -torch.where(ahead > 0, slopes.flip(0), slopes)[None] * ahead.abs()
    distance = ahead.abs() - (0.5 * (ahead > 0) if config.alibi == "offset" else 0.0)
    return (-slopes * distance)[None]


def bias_by_sum(config, length, mask, dtype):
    """The position bias and half of the lowest number of hidden keys: a sum in fp32, rounded."""
    bias = bias_by_formula(config, length)
    seen = torch.ones(1, 1, length, dtype=torch.bool)
    if mask is not None and mask.dtype != torch.bool:
        seen = mask[:, None] == mask[:, :, None]
    elif mask is not None and not config.causal:
        seen = mask[:, None, :]
    if config.causal:
        seen = seen & torch.ones(length, length, dtype=torch.bool).tril()
    if not seen.all():
        hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min / 2)
        bias = bias + hidden[:, None]
    return bias.to(dtype)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("position", "kind"), POSITIONS)
@both_directions
def test_the_bias_has_the_bits_of_a_sum_in_fp32_that_is_rounded(
    position, kind, causal, dtype, mask
):
    config, mask = config_of(position, kind, 12, causal), masks(320)[mask]
    bias = bias_of(config, 320, mask, dtype)
    if mask is None and not causal and not config.method.score_bias:
        assert bias is None
        return
    expected = bias_by_sum(config, 320, mask, dtype)
    assert bias.dtype == dtype
    assert torch.equal(bias, expected)


def test_hidden_keys_have_half_of_the_lowest_number_in_fp16_too():
    """Where -65504 and ALiBi were added up, far ones had -inf."""
    config, mask = config_of("alibi", "offset"), masks(320)["documents"]
    bias = bias_of(config, 320, mask, torch.float16)
    shown = (mask[:, None, :] == mask[:, :, None])[:, None].expand_as(bias)
    assert set(bias[~shown].tolist()) == {torch.finfo(torch.float16).min / 2}
    assert torch.equal(bias[shown], bias_by_sum(config, 320, mask, torch.float16)[shown])


@pytest.mark.parametrize(
    ("variant", "mask", "dtype"),
    pairwise(
        ("zero-clap", "alibi-symmetric", "baseline", "causal-alibi", "causal-rotary"),
        MASKS,
        (torch.float32, torch.bfloat16),
    ),
    ids=str,
)
def test_training_gives_the_bits_that_it_gives_with_a_whole_bias(variant, dtype, mask, monkeypatch):
    """Logits and gradients, with dropout: bias and tiles are a matter of memory alone."""
    config, mask = presets.build("tiny", variant, 50, {"max_positions": 530}), masks(530)[mask]
    ids = torch.randint(4, 49, (2, 530), generator=torch.Generator().manual_seed(1))
    places = torch.arange(0, 1060, 11)

    def trained():
        torch.manual_seed(0)
        model = LanguageModel(config).train().to(dtype)
        logits = model(ids, mask, places)
        logits.float().square().sum().backward()
        return [logits.detach(), *(parameter.grad for parameter in model.parameters())]

    ours = trained()

    def whole_bias(scores, document_ids, num_heads, x, in_parts, causal, window):
        bias = bias_by_sum(config, 530, mask, dtype)
        return (bias,) if in_parts else bias

    monkeypatch.setattr(encoder, "dense_bias", whole_bias)
    for whole, in_parts in zip(trained(), ours, strict=True):
        assert torch.equal(whole, in_parts)


@pytest.mark.parametrize("mask", MASKS)
def test_training_with_dropout_on_a_cpu_makes_no_bias_of_all_scores(mask):
    """The attention weights of each layer, [B, H, T, T], and no other tensor of that size."""
    config = presets.build("tiny", "zero-clap", 50, {"num_heads": 16})
    model = LanguageModel(config).train()
    ids = torch.randint(4, 49, (2, 320), generator=torch.Generator().manual_seed(1))
    with LiveBytes() as memory:
        model(ids, masks(320)[mask], torch.arange(0, 640, 7))
    scores = 4 * 2 * 16 * 320**2
    assert [size for size in memory.made if size >= scores] == [scores] * config.num_layers


def test_only_layers_that_compute_in_tiles_get_the_bias_in_parts(run_ranks):
    """Not in evaluation, nor in another precision, nor where layers are compiled."""
    ids, mask = torch.full((2, 320), 7), masks(320)["padding"]

    def work():
        model = LanguageModel(presets.build("tiny", "zero-clap", 50, {}))

        def shapes():
            bias = model.encoder.embed(ids, mask)[1].bias
            return [part.shape for part in bias] if isinstance(bias, tuple) else bias.shape

        found = []
        for change in (model.train, model.eval, model.train, model.bfloat16, model.float):
            change()
            found.append(shapes())
        torch.compile = lambda function, **_: function  # it would compile the embeddings as well
        compile_layers(model)
        return [*found, shapes()]

    parts, whole = [(1, 4, 320, 320), (2, 1, 1, 320)], (2, 4, 320, 320)
    assert run_ranks(1, work)[0] == [parts, whole, parts, whole, parts, whole]


@pytest.mark.parametrize(
    "document_ids",
    [None, torch.ones(2, 320, dtype=torch.bool), torch.tensor([[1], [7]]).expand(2, 320)],
    ids=["none", "bool", "integers"],
)
def test_rows_without_padding_share_one_alibi_bias(document_ids):
    """Full rows of one document each: on a CPU, which can look, the mask is left out."""
    config = config_of("alibi", "offset")
    bias = bias_of(config, 320, document_ids, torch.bfloat16)
    assert bias.shape == (1, 4, 320, 320)
    assert torch.equal(bias, bias_of(config, 320, None, torch.bfloat16))


def test_a_rotation_acts_on_queries_and_keys_only():
    """Where attention is computed in tiles and where it is not."""
    qkv = drawn(2, 9, 3, 4, 8)

    def rotation(x):
        assert x.shape == (2, 9, 4, 8)
        return x.flip(-1) * torch.arange(1.0, 9.0)

    query, key, value = qkv.unbind(2)
    turned = torch.stack([rotation(query), rotation(key), value], dim=2)
    for bias in (None, (), drawn(1, 4, 9, 9)):
        ours = attend(qkv, AttentionContext(bias, rotation), 0.0)
        expected = attend(turned, AttentionContext(bias), 0.0)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
