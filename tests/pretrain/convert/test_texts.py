"""Exported models read, fill and continue texts in transformers as they do here."""

import math

import pytest
import torch

from data_prep import unigram
from data_prep.tokenizer import Tokenizer
from pretrain.convert.model_folder import load_model
from pretrain.convert.writing import save_model
from pretrain.inference.pretrained import Pretrained
from tests.pretrain.convert.conftest import HEADS, loaded
from tests.pretrain.convert.contents import random_contents

PROMPTS = ["The value of", "", "an object is a value; so is what it holds", "é 東"]
TOKENS = "encoder.embeddings.tokens.weight"


def words_of(transformers, folder):
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def pipeline_of(transformers, task, folder):
    return transformers.pipeline(task, model=str(folder), trust_remote_code=True)


@pytest.mark.parametrize(
    ("name", "separators", "second"),
    [("baseline", 2, None), ("zero-clap", 2, None), ("albert", 1, 1), ("albert-one-segment", 1, 0)],
)
def test_the_tokenizer_lays_texts_out_as_in_training(
    name, separators, second, transformers, exported, tokenizer
):
    theirs = words_of(transformers, exported(name).folder)
    ours = Pretrained(exported(name).ours, "cpu")
    texts = ["The value of it.", "  two  spaces\n", "naïve 東京 \U0001f600", ""]
    ids = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    assert theirs(texts)["input_ids"] == [[0, *one, 2] for one in ids]
    assert theirs(texts)["input_ids"] == [ours.encode(text).tolist() for text in texts]
    pair = theirs(texts[0], texts[2])
    assert pair["input_ids"] == [0, *ids[0], *[2] * separators, *ids[2], 2]
    assert pair["input_ids"] == ours.encode(texts[0], texts[2]).tolist()
    types = [0] * (len(ids[0]) + 2) + [second] * (len(ids[2]) + 1)
    assert pair.get("token_type_ids") == (None if second is None else types)
    of, dot = tokenizer.encode_batch(["of", "."])
    masked = [0, *of, tokenizer.mask_id, *dot, 2]
    assert theirs("of <mask>.")["input_ids"] == masked
    assert theirs.decode(masked[1:-1]) == "of<mask>."
    assert theirs.decode(ids[1]) == texts[1]
    padded = theirs(texts, padding=True, return_tensors="pt")
    assert padded["input_ids"][3].tolist()[2:] == [1] * (padded["input_ids"].shape[1] - 2)
    assert theirs.model_max_length == 64, "so that pipelines truncate"
    assert len(theirs(" a" * 128, truncation=True)["input_ids"]) == 64
    card = (exported(name).folder / "README.md").read_text()
    assert ("truncates texts to 64 tokens" in card) == (name == "zero-clap")


@pytest.fixture(scope="module")
def pieces():
    texts = ["The value of it is what it was, and this value is all of it.", "What was it?"] * 9
    return Tokenizer(unigram.train(texts, 320, lowercase=True))


@pytest.mark.parametrize("name", ["baseline", "learned-clap", "zero-clap", "albert-gelu"])
def test_the_fill_mask_pipeline_gives_our_fillers(name, transformers, exported, tokenizer, pieces):
    vocabulary = pieces if name == "albert-gelu" else tokenizer
    export = exported(name, None, vocabulary)
    pipeline = pipeline_of(transformers, "fill-mask", export.folder)
    for text in ("The value of <mask> is.", "<mask> it", "value<mask>.", "a <mask> of <mask>"):
        theirs = pipeline(text, top_k=7)
        ours = Pretrained(export.ours, "cpu").fill_mask(text, top_k=7)
        for mine, other in zip(ours, theirs if len(ours) > 1 else [theirs], strict=True):
            assert [filler.token for filler in mine] == [filler["token_str"] for filler in other]
            assert [filler.probability for filler in mine] == pytest.approx(
                [filler["score"] for filler in other], abs=1e-5
            )
    rows = export.contents.config.vocab_size
    assert len({filler["token"] for filler in pipeline("of <mask>", top_k=rows)}) == rows


def test_the_text_classification_pipeline_gives_our_labels(transformers, exported):
    pipeline = pipeline_of(
        transformers, "text-classification", exported("zero-clap", "topic").folder
    )
    found = {answer["label"] for answer in pipeline("The value of it.", top_k=None)}
    assert found == set(HEADS["topic"].labels)


# --- causal models -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def causal(tokenizer, tmp_path_factory):
    """The folder of a model of long and varied texts: embeddings are small, none is repeated."""
    contents = random_contents("causal-rotary", tokenizer, scale=1.0)
    contents.weights[TOKENS][tokenizer.eos_id] = 0.0
    contents.weights[TOKENS].mul_(0.1)
    folder = tmp_path_factory.mktemp("causal") / "model"
    save_model(folder, contents)
    return folder


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


def test_generate_gives_the_most_likely_tokens_of_the_whole_text(transformers, causal, tokenizer):
    """Of unequal prompts in one batch, with settings of a cache; and so does the pipeline."""
    ours = load_model(causal).model
    expected = [greedy(ours, tokenizer, prompt) for prompt in PROMPTS]
    assert len({*"".join(expected)}) > 8
    theirs, words = loaded(transformers, causal, "ForCausalLM"), words_of(transformers, causal)
    inputs = words(PROMPTS, padding=True, return_tensors="pt")
    for settings in ({}, {"use_cache": True}, {"use_cache": False}):
        made = theirs.generate(**inputs, max_new_tokens=12, do_sample=False, **settings)
        new = made[:, inputs["input_ids"].shape[1] :]
        assert words.batch_decode(new, skip_special_tokens=True) == expected
    config = theirs.generation_config
    assert config.suppress_tokens == [0, 1, 3, tokenizer.mask_id]
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 1, 2)
    pipeline = pipeline_of(transformers, "text-generation", causal)
    (answer,) = pipeline(PROMPTS[0], max_new_tokens=12, do_sample=False)
    assert answer["generated_text"] == PROMPTS[0] + expected[0]
    assert "pipeline_tag: text-generation" in (causal / "README.md").read_text()


def test_the_tokenizer_begins_texts_and_does_not_end_them(
    transformers, causal, exported, tokenizer
):
    """A classifier reads whole texts, also where its model is causal."""
    words = words_of(transformers, causal)
    a, b = (ids.tolist() for ids in tokenizer.encode_batch(["The value", " of it."]))
    assert words("The value", " of it.")["input_ids"] == [0, *a, *b]
    padded = words(["The value", ""], padding=True)
    assert padded["input_ids"] == [[0, *a], [1] * len(a) + [0]]
    assert padded["attention_mask"] == [[1] * (1 + len(a)), [0] * len(a) + [1]]
    words = words_of(transformers, exported("causal-alibi", "average").folder)
    assert words("The value", " of it.")["input_ids"] == tokenizer.lay_out([a, b])
