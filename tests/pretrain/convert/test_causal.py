"""Causal models in transformers: the same logits, losses and texts, with its caches."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pretrain.convert import huggingface_export, huggingface_import
from pretrain.convert.huggingface_layout import plain_type
from pretrain.model import presets
from pretrain.model.config import ModelConfig
from pretrain.models.generate import GenerationSettings, generate
from pretrain.models.model_folder import ModelContents
from tests.pretrain.convert.conftest import HEADS, batch, loaded
from tests.pretrain.convert.conftest import random_model as with_heads
from tests.pretrain.models.test_generate import PROMPTS, VARIANTS, random_model


@pytest.fixture(scope="module")
def exports(tokenizer, transformers, tmp_path_factory):
    """`exports(variant)`: our model, transformers' model of its export, and its tokenizer."""

    @functools.cache
    def make(variant, **overrides):
        ours = random_model(variant, tokenizer, **overrides)
        folder = tmp_path_factory.mktemp("causal") / "export"
        contents = ModelContents(ours.config, ours.state_dict(), tokenizer, {})
        assert len(huggingface_export.write_folder(folder, contents)) == 1
        theirs = loaded(transformers, folder, "ForCausalLM")
        auto = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        return SimpleNamespace(folder=folder, ours=ours, theirs=theirs, tokenizer=auto)

    return make


@pytest.fixture(params=VARIANTS)
def export(request, exports):
    return exports(request.param)


def test_learned_positions_are_opt_and_need_no_code_of_ours(transformers, exports):
    learned = exports("causal-learned")
    assert not list(learned.folder.glob("*.py"))
    assert type(learned.theirs) is transformers.OPTForCausalLM
    unscaled = exports("causal-learned", embedding_scale="one")
    assert unscaled.theirs.lm_head.weight is unscaled.theirs.get_input_embeddings().weight
    test_logits_are_ours_with_padding_on_either_side(unscaled)
    with pytest.raises(ValueError, match="model_type 'opt'; accepted: 'roberta', 'albert'"):
        huggingface_import.read_folder(learned.folder)


@pytest.mark.parametrize(
    "values", [{"layer_norm": "post"}, {"activation": "gelu"}, {"head": "clap"}, {"causal": False}]
)
def test_a_model_that_differs_from_opt_is_not_exported_as_one(values):
    config = presets.build("tiny", "causal-learned", 60, {})
    assert plain_type(config) == "opt"
    assert plain_type(ModelConfig(**{**config.to_dict(), **values})) is None
    assert plain_type(config, HEADS["average"]) is None


@torch.no_grad()
def test_logits_are_ours_with_padding_on_either_side(export):
    ids, mask, places = batch(export.ours.config.vocab_size)
    expected = export.ours(ids, mask.bool(), places)
    bound = 1e-5 * expected.abs().max()
    right = export.theirs(input_ids=ids, attention_mask=mask).logits.flatten(0, 1)[places]
    assert (right - expected).abs().max() < bound
    left = export.theirs(input_ids=ids.roll(12, 1)[1:], attention_mask=mask.roll(12, 1)[1:])
    assert (left.logits[0, 12:] - expected[24:]).abs().max() < bound
    everywhere = export.ours(ids[:1], None, torch.arange(24))
    assert (export.theirs(input_ids=ids[:1]).logits[0] - everywhere).abs().max() < bound


@pytest.mark.parametrize("settings", [{}, {"use_cache": False}], ids=["cached", "uncached"])
def test_generate_gives_our_greedy_texts(export, tokenizer, settings):
    """Of unequal prompts in one batch, and of a prompt alone."""
    expected = generate(export.ours, tokenizer, PROMPTS, GenerationSettings(max_tokens=12))
    inputs = export.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    made = export.theirs.generate(**inputs, max_new_tokens=12, do_sample=False, **settings)
    new = made[:, inputs["input_ids"].shape[1] :]
    assert export.tokenizer.batch_decode(new, skip_special_tokens=True) == expected
    alone = export.tokenizer(PROMPTS[0], return_tensors="pt")
    made = export.theirs.generate(**alone, max_new_tokens=12, do_sample=False, **settings)
    assert export.tokenizer.decode(made[0], skip_special_tokens=True) == PROMPTS[0] + expected[0]


def test_special_tokens_are_not_generated(export, tokenizer):
    config = export.theirs.generation_config
    assert config.suppress_tokens == [0, 1, 3, tokenizer.mask_id]
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 1, 2)


def test_the_tokenizer_begins_texts_and_does_not_end_them(export, tokenizer):
    a, b = (ids.tolist() for ids in tokenizer.encode_batch(["The value", " of it."]))
    assert export.tokenizer("The value")["input_ids"] == [0, *a]
    assert export.tokenizer("The value", " of it.")["input_ids"] == [0, *a, *b]
    padded = export.tokenizer(["The value", ""], padding=True)
    assert padded["input_ids"] == [[0, *a], [1] * len(a) + [0]]
    assert padded["attention_mask"] == [[1] * (1 + len(a)), [0] * len(a) + [1]]


def test_the_loss_compares_each_logit_with_the_next_label(export):
    ids, mask, _ = batch(export.ours.config.vocab_size)
    labels = ids.masked_fill(mask == 0, -100)
    output = export.theirs(input_ids=ids, attention_mask=mask, labels=labels)
    places = torch.cat([torch.arange(23), torch.arange(24, 35)])
    wanted = torch.cat([ids[0, 1:], ids[1, 1:12]])
    expected = F.cross_entropy(export.ours(ids, mask.bool(), places), wanted)
    torch.testing.assert_close(output.loss, expected, atol=2e-5, rtol=0)


@torch.no_grad()
def test_a_cache_is_made_and_used_without_a_mask_and_the_last_logits_suffice(exports):
    export = exports("causal-rotary")
    ids, _, _ = batch(export.ours.config.vocab_size)
    ids = ids[:1]
    whole = export.theirs(input_ids=ids).logits
    first = export.theirs(input_ids=ids[:, :10], use_cache=True)
    assert first.past_key_values.get_seq_length() == 10
    rest = export.theirs(
        input_ids=ids[:, 10:], past_key_values=first.past_key_values, logits_to_keep=3
    )
    assert rest.logits.shape[1] == 3
    assert (rest.logits - whole[:, -3:]).abs().max() < 1e-5 * whole.abs().max()
    with pytest.raises(ValueError, match=r"attention_mask: \[1, 1\] is not .* must be \[1, 25\]"):
        export.theirs(
            input_ids=ids[:, :1],
            attention_mask=torch.ones(1, 1),
            past_key_values=first.past_key_values,
        )


def test_the_text_generation_pipeline_continues_a_text(transformers, exports, tokenizer):
    export = exports("causal-alibi")
    pipeline = transformers.pipeline(
        "text-generation", model=str(export.folder), trust_remote_code=True
    )
    (expected,) = generate(export.ours, tokenizer, [PROMPTS[0]], GenerationSettings(max_tokens=9))
    (answer,) = pipeline(PROMPTS[0], max_new_tokens=9, do_sample=False)
    assert answer["generated_text"] == PROMPTS[0] + expected
    assert "pipeline_tag: text-generation" in (export.folder / "README.md").read_text()


def test_a_head_on_the_first_token_of_a_causal_model_is_refused(transformers, tokenizer, tmp_path):
    contents, _, _ = with_heads("causal-alibi", tokenizer)
    message = "pooling: 'first' is not accepted; it must be 'mean' for a causal model"
    with pytest.raises(ValueError, match=message):
        huggingface_export.write_folder(tmp_path / "first", contents, "topic")
    huggingface_export.write_folder(tmp_path / "mean", contents, "average")
    auto = transformers.AutoModelForSequenceClassification
    auto.from_pretrained(tmp_path / "mean", trust_remote_code=True)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "mean", trust_remote_code=True)
    first, second = (ids.tolist() for ids in tokenizer.encode_batch(["A film.", "It was good."]))
    expected = tokenizer.lay_out([first, second])
    assert exported("A film.", "It was good.")["input_ids"] == expected
    with pytest.raises(ValueError, match=message):
        auto.from_pretrained(tmp_path / "mean", trust_remote_code=True, classifier_pooling="first")
