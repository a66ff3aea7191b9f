"""The Python interface to a model folder."""

import pytest
import torch

from pretrain.convert.writing import save_model
from pretrain.inference.pretrained import Pretrained
from pretrain.model import presets
from tests.pretrain.convert.conftest import HEADS
from tests.pretrain.convert.contents import random_contents

TEXTS = ["the value of a name", "a", "an object is a value; so is what it holds", "of"]


@pytest.fixture(scope="module")
def make(tokenizer, tmp_path_factory):
    """`make(variant)`: a model, with one of the classification heads or without."""

    def load(variant, vocabulary=tokenizer, rows=tokenizer.vocab_size, head=None):
        folder = tmp_path_factory.mktemp("made") / variant
        save_model(folder, random_contents(variant, vocabulary, HEADS.get(head), rows=rows))
        return Pretrained.load(folder)

    return load


@pytest.fixture(scope="module", params=list(presets.VARIANTS))
def model(make, request):
    return make(request.param)


@pytest.fixture(scope="module")
def one(make):
    return make("zero-clap")


def test_a_model_with_segments_reads_two_texts_as_albert_does(make):
    model = make("albert")
    ids, other = model.encode("a premise.", "a hypothesis."), model.encode("a premise.")
    first = len(other)
    batch = model.collate([ids, other])
    segments = (torch.arange(len(ids)) >= first).long()[None]
    encoder = model.loaded.model.encoder
    with torch.no_grad():
        expected = encoder(ids[None], segment_ids=segments)
        alone = encoder(batch[1:, :first])
    torch.testing.assert_close(model.features(batch)[:1], expected)
    torch.testing.assert_close(model.features(batch)[1:, :first], alone)
    assert torch.equal(model.features(ids, all_layers=True)[-1], expected)
    assert not torch.allclose(expected, encoder(ids[None]))
    with pytest.raises(ValueError, match="3 texts; the model has segments for 2"):
        model.encode("a", "b", "c")


@pytest.mark.parametrize(
    ("variant", "texts"),
    [
        *(("zero-clap", texts) for texts in (("Hello world!",), ("",), ("a", "b"), ("", ""))),
        *(("zero-clap", texts) for texts in (("a", ""), ("", "b", "<mask> </s>"))),
        *(("albert", texts) for texts in (("a b",), ("a", "b"), ("", ""), ("a", ""), ("", "b"))),
    ],
)
def test_decoding_gives_the_texts_back(variant, texts, make):
    model = make(variant)
    expected = texts if len(texts) > 1 else texts[0]
    ids = model.encode(*texts)
    assert model.decode(ids) == expected
    padded = model.collate([ids, model.encode("longer than all of the others")])
    assert model.decode(padded[:1]) == model.decode(padded[0]) == expected


def test_decoding_shows_the_special_tokens_inside(one, tokenizer):
    ids = one.encode("a b")
    ids[1] = tokenizer.mask_id
    shown = one.decode(ids)
    assert shown.startswith("<mask>")
    assert one.decode(torch.tensor([2])) == ""
    assert one.decode(torch.tensor([0, 2, 5, 2])) == "</s>" + tokenizer.token_text(5)


def test_features_are_those_of_the_encoder_and_ignore_padding(model):
    encoder, encoded = model.loaded.model.encoder, [model.encode(text) for text in TEXTS]
    ids, batch = encoded[0], model.collate(encoded)
    with torch.no_grad():
        assert torch.equal(model.features(ids), encoder(ids[None]))
    assert batch.shape == (4, max(len(ids) for ids in encoded))
    wide = torch.nn.functional.pad(batch, (0, 3), value=1)
    for features in (model.features(batch), model.features(wide)):
        for row, ids in zip(features, encoded, strict=True):
            torch.testing.assert_close(row[: len(ids)], model.features(ids)[0])
    if encoder.config.latents:
        with pytest.raises(ValueError, match="this model has 64 latents"):
            model.features(ids, all_layers=True)
        return
    layers = model.features(ids, all_layers=True)
    assert len(layers) == len(encoder.layers) + 1
    with torch.no_grad():
        expected = encoder.hidden_states(ids[None])
    assert all(torch.equal(x, y) for x, y in zip(layers, expected, strict=True))
    assert not layers[-1].requires_grad
    for layer, alone in zip(model.features(batch, all_layers=True), layers, strict=True):
        torch.testing.assert_close(layer[-1, : len(ids)], alone[0])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("variant", ["baseline", "zero-clap", "albert", "causal-rotary"])
def test_predictions_are_those_of_the_head_and_ignore_padding(variant, head, make):
    config = HEADS[head]
    if variant.startswith("causal") and config.pooling == "first":
        pytest.skip("refused when the folder is written")
    model = make(variant, head=head)
    encoded = [model.encode(*texts) for texts in (*((text,) for text in TEXTS), ("a", "b"))]
    together = model.predict(model.collate(encoded))
    assert together.shape == (5, config.classes)
    for row, ids in zip(together, encoded, strict=True):
        logits = model.loaded.classifier(model.features(ids), None)
        expected = logits if config.classes == 1 else logits.log_softmax(-1)
        torch.testing.assert_close(row[None], expected)
        torch.testing.assert_close(model.predict(ids), expected)


def test_what_a_model_has_no_head_for_is_refused(one, make):
    with pytest.raises(ValueError, match="zero-clap: has no classification head"):
        one.predict(one.encode("a"))
    with pytest.raises(ValueError, match="zero-clap: has no head over the vocabulary"):
        make("zero-clap", head="topic").fill_mask("a <mask>")
    with pytest.raises(ValueError, match="the model is causal"):
        make("causal-alibi").fill_mask("a <mask>")


INVALID_IDS = [
    ("a text", r"'a text' is not a tensor of ids; encode\(\) makes one"),
    ([0, 5, 2], r"\[0, 5, 2\] is not a tensor of ids"),
    (torch.zeros(4), r"torch.float32 tensor of shape \[4\]; ids are integers"),
    (torch.zeros(1, 2, 3, dtype=torch.long), r"shape \[1, 2, 3\]"),
    (torch.tensor(4), r"shape \[\]"),
    (torch.zeros(0, dtype=torch.long), r"\[0\]: an empty text"),
    (torch.zeros(0, 5, dtype=torch.long), r"\[0, 5\]: an empty text"),
    (torch.zeros(3, 0, dtype=torch.long), r"\[3, 0\]: an empty text"),
    (torch.tensor([[0, 5, 2], [1, 1, 1]]), r"\[2, 3\]: .* padding only"),
    (torch.tensor([[0, 5, 2], [1, 0, 2]]), "row 1: <pad> at place 0 stands before other ids"),
    (torch.tensor([0, -1, 2]), r"id -1: the model has ids from 0 to below \d+"),
    (torch.tensor([0, 70000, 2]), r"id 70000: the model has ids from 0 to below \d+"),
]


@pytest.mark.parametrize("variant", ["baseline", "zero-clap"])
def test_invalid_ids_are_refused_before_the_model_reads_them(variant, make):
    model = make(variant, head="topic")
    for reader in (model.features, model.decode, model.predict):
        for ids, message in INVALID_IDS:
            with pytest.raises(ValueError, match=message):
                reader(ids)


def test_decoding_a_batch_and_an_empty_batch_are_refused(one):
    ids = one.encode("a b")
    with pytest.raises(ValueError, match=r"shape \[2, \d\]; decode takes one row"):
        one.decode(one.collate([ids, ids]))
    with pytest.raises(ValueError, match="an empty batch"):
        one.collate([])
    with pytest.raises(ValueError, match=r"'a b': collate takes tensors of ids \[T\]"):
        one.collate(["a b"])


def test_a_text_longer_than_learned_positions_is_refused_and_alibi_reads_it(make):
    ids = torch.full((70,), 5)
    with pytest.raises(ValueError, match="input of 70 tokens: learned positions end at 64"):
        make("baseline").features(ids)
    assert make("alibi").features(ids).shape == (1, 70, 32)


def test_any_id_beyond_the_rows_is_the_mask(make, tokenizer):
    """Published zero-mask models have fewer rows than their vocabulary has ids."""
    model = make("zero-clap", rows=tokenizer.vocab_size - 2)
    rows = model.loaded.model.config.vocab_size
    first, last = (model.features(torch.tensor([0, 7, id, 2])) for id in (rows, tokenizer.mask_id))
    assert torch.equal(first, last)
    beyond = torch.tensor([0, tokenizer.vocab_size, 2])
    with pytest.raises(ValueError, match=f"id {tokenizer.vocab_size}: "):
        model.features(beyond)
    assert make("zero-clap", vocabulary=None).features(beyond).shape == (1, 3, 32)
