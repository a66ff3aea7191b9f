"""Causal models in transformers: the same logits, losses and texts."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pretrain.convert.contents import ModelContents
from pretrain.convert.writing import save_model
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from tests.pretrain.convert.conftest import batch, loaded
from tests.pretrain.convert.conftest import random_model as with_heads

VARIANTS = [name for name in presets.VARIANTS if name.startswith("causal-")]
PROMPTS = ["The value of", "", "an object is a value; so is what it holds", "é 東"]


def random_model(variant, tokenizer):
    """A model of long and varied texts: embeddings are small, so that they are not repeated."""
    torch.manual_seed(1)
    model = LanguageModel(presets.build("tiny", variant, tokenizer.vocab_size, {})).eval()
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight += (1.0 if weight.dim() == 2 else 0.1) * torch.randn_like(weight)
        table = model.encoder.embeddings.tokens.weight
        table[tokenizer.eos_id] = 0.0
        table *= 0.1
    return model


@pytest.fixture(scope="module")
def exports(tokenizer, transformers, tmp_path_factory):
    """`exports(variant)`: our model, transformers' model of its export, and its tokenizer."""

    @functools.cache
    def make(variant):
        ours = random_model(variant, tokenizer)
        folder = tmp_path_factory.mktemp("causal") / "export"
        contents = ModelContents(ours.config, ours.state_dict(), tokenizer, {})
        save_model(folder, contents)
        theirs = loaded(transformers, folder, "ForCausalLM")
        auto = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        return SimpleNamespace(folder=folder, ours=ours, theirs=theirs, tokenizer=auto)

    return make


@pytest.fixture
def export(exports):
    return exports("causal-rotary")


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_are_ours_with_padding_on_either_side(variant, exports):
    export = exports(variant)
    ids, mask, places = batch(export.ours.config.vocab_size)
    expected = export.ours(ids, mask.bool(), places)
    bound = 1e-5 * expected.abs().max()
    right = export.theirs(input_ids=ids, attention_mask=mask).logits.flatten(0, 1)[places]
    assert (right - expected).abs().max() < bound
    left = export.theirs(input_ids=ids.roll(12, 1)[1:], attention_mask=mask.roll(12, 1)[1:])
    assert (left.logits[0, 12:] - expected[24:]).abs().max() < bound
    everywhere = export.ours(ids[:1], None, torch.arange(24))
    assert (export.theirs(input_ids=ids[:1]).logits[0] - everywhere).abs().max() < bound


@torch.no_grad()
def greedy(model, tokenizer, prompt):
    """The most likely token of each whole text, but for special tokens, up to `</s>`."""
    ids = [0, *tokenizer.encode_batch([prompt])[0].tolist()]
    made = []
    while len(made) < 12 and 2 not in made:
        last = torch.tensor([len(ids) + len(made) - 1])
        logits = model(torch.tensor([ids + made]), None, last)[0]
        logits[[0, 1, 3, tokenizer.mask_id]] = -math.inf
        made.append(int(logits.argmax()))
    return tokenizer.decode([id for id in made if id != 2])


@pytest.mark.parametrize("settings", [{}, {"use_cache": True}, {"use_cache": False}], ids=str)
def test_generate_gives_the_most_likely_tokens_of_the_whole_text(export, tokenizer, settings):
    """Of unequal prompts in one batch."""
    expected = [greedy(export.ours, tokenizer, prompt) for prompt in PROMPTS]
    assert len({*"".join(expected)}) > 9
    inputs = export.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    made = export.theirs.generate(**inputs, max_new_tokens=12, do_sample=False, **settings)
    new = made[:, inputs["input_ids"].shape[1] :]
    assert export.tokenizer.batch_decode(new, skip_special_tokens=True) == expected


def test_the_text_generation_pipeline_continues_a_text(transformers, export, tokenizer):
    pipeline = transformers.pipeline(
        "text-generation", model=str(export.folder), trust_remote_code=True
    )
    (answer,) = pipeline(PROMPTS[0], max_new_tokens=12, do_sample=False)
    assert answer["generated_text"] == PROMPTS[0] + greedy(export.ours, tokenizer, PROMPTS[0])
    assert "pipeline_tag: text-generation" in (export.folder / "README.md").read_text()


def test_special_tokens_are_not_generated(export, tokenizer):
    config = export.theirs.generation_config
    assert config.suppress_tokens == [0, 1, 3, tokenizer.mask_id]
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 1, 2)


def test_the_tokenizer_begins_texts_and_does_not_end_them(export, tokenizer):
    a, b = (ids.tolist() for ids in tokenizer.encode_batch(["The value", " of it."]))
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


def test_a_head_on_the_first_token_of_a_causal_model_is_refused(transformers, tokenizer, tmp_path):
    message = "pooling: 'first' is not accepted; it must be 'mean' for a causal model"
    with pytest.raises(ValueError, match=message):
        save_model(tmp_path / "first", with_heads("causal-alibi", tokenizer, "topic")[0])
    save_model(tmp_path / "mean", with_heads("causal-alibi", tokenizer, "average")[0])
    auto = transformers.AutoModelForSequenceClassification
    auto.from_pretrained(tmp_path / "mean", trust_remote_code=True)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "mean", trust_remote_code=True)
    first, second = (ids.tolist() for ids in tokenizer.encode_batch(["A film.", "It was good."]))
    expected = tokenizer.lay_out([first, second])
    assert exported("A film.", "It was good.")["input_ids"] == expected
    with pytest.raises(ValueError, match=message):
        auto.from_pretrained(tmp_path / "mean", trust_remote_code=True, classifier_pooling="first")
