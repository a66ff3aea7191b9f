"""Filling masks in a text."""

from pathlib import Path

import pytest
import torch

from pretrain.convert.contents import ModelContents
from pretrain.convert.model_folder import LoadedModel
from pretrain.inference.pretrained import Pretrained
from pretrain.model import presets


class Reader(torch.nn.Module):
    """A fake model that records what it reads and prefers given tokens."""

    def __init__(self, tokenizer, *preferred):
        super().__init__()
        self.config = presets.build("tiny", "zero-clap", tokenizer.vocab_size, {})
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.preferred = [tokenizer.encode_batch([word])[0].tolist()[0] for word in preferred]
        self.read = None

    def forward(self, ids, document_ids, positions):
        self.read = ids[0].tolist()
        logits = torch.zeros(len(positions), self.config.vocab_size)
        for mask in range(len(positions)):
            logits[mask, self.preferred[mask]] = 9.0
        return logits


def fill_mask(reader, tokenizer, text, top_k=5):
    contents = ModelContents(reader.config, {"head.beta": reader.weight}, tokenizer, {})
    loaded = LoadedModel(Path(), contents, reader, None)
    return Pretrained(loaded, "cpu").fill_mask(text, top_k)


def test_a_space_before_the_mask_belongs_to_the_filler(tokenizer):
    reader = Reader(tokenizer, " the")
    ((filler,),) = fill_mask(reader, tokenizer, "of <mask> value", top_k=1)
    assert (filler.token, filler.text) == (" the", "of the value")
    of, value = tokenizer.encode_batch(["of", " value"])
    assert reader.read == [0, *of, tokenizer.mask_id, *value, 2]
    logits = torch.tensor([9.0] + [0.0] * (reader.config.vocab_size - 1))
    assert filler.probability == pytest.approx(float(logits.softmax(0)[0]))


@pytest.mark.parametrize(
    ("text", "filler", "filled"),
    [
        ("<mask> value", "s", "s value"),
        (" <mask> value", " the", " the value"),
        ("of <mask>.", " the", "of the."),
        ("of <mask>.", "s", "ofs."),  # the model reads "of<mask>."
        ("value<mask>.", "s", "values."),
        ("of  <mask>.", " the", "of  the."),
        ("of\n<mask>.", "s", "of\ns."),
        ("of\n <mask>. \n", " the", "of\n the. \n"),
    ],
)
def test_the_filled_text_is_what_the_model_read(tokenizer, text, filler, filled):
    reader = Reader(tokenizer, filler)
    ((best,),) = fill_mask(reader, tokenizer, text, top_k=1)
    assert (best.token, best.text) == (filler, filled)
    chosen = tokenizer.encode_batch([filler])[0].tolist()[0]
    read = [chosen if id == tokenizer.mask_id else id for id in reader.read[1:-1]]
    assert tokenizer.decode(read) == filled


@pytest.mark.parametrize("text", ["<mask> <mask>", "of <mask> <mask>.", "of<mask><mask>."])
def test_consecutive_masks_have_nothing_between_them(tokenizer, text):
    reader = Reader(tokenizer, " the", "s")
    first, second = fill_mask(reader, tokenizer, text, top_k=1)
    inside = tokenizer.encode_batch(["of"])[0].tolist() if text.startswith("of") else []
    end = tokenizer.encode_batch(["."])[0].tolist() if text.endswith(".") else []
    assert reader.read == [0, *inside, tokenizer.mask_id, tokenizer.mask_id, *end, 2]
    assert first[0].text == text.replace(" <mask>" if "of <" in text else "<mask>", " the", 1)
    assert second[0].text == "s".join(text.rsplit(" <mask>" if " <" in text else "<mask>", 1))


@pytest.mark.parametrize(
    "text", ["The value of <mask>.", "<mask> is the value.", "The<mask> value", "the <mask>"]
)
def test_the_ids_are_those_of_fairseq(tokenizer, text):
    """fairseq strips the end of each piece, and joins their ids around the mask's."""
    reader = Reader(tokenizer, "s")
    fill_mask(reader, tokenizer, text, top_k=1)
    before, after = tokenizer.encode_batch([piece.rstrip() for piece in text.split("<mask>")])
    assert reader.read == [0, *before, tokenizer.mask_id, *after, 2]


def test_each_of_several_masks_is_filled_with_the_others_left(tokenizer):
    reader = Reader(tokenizer, "s", " the", ".")
    fillers = fill_mask(reader, tokenizer, "<mask> of <mask> value<mask>", top_k=2)
    assert [len(candidates) for candidates in fillers] == [2, 2, 2]
    assert [candidates[0].text for candidates in fillers] == [
        "s of <mask> value<mask>",
        "<mask> of the value<mask>",
        "<mask> of <mask> value.",
    ]
    assert reader.read.count(tokenizer.mask_id) == 3
    for first, second in fillers:
        assert first.probability > second.probability


def test_special_tokens_in_the_text_are_plain_text(tokenizer):
    reader = Reader(tokenizer, "s")
    fill_mask(reader, tokenizer, "a </s> b <mask> <pad>", top_k=1)
    assert reader.read.count(2) == reader.read.count(0) == 1
    assert 1 not in reader.read


def test_probabilities_over_the_whole_vocabulary_sum_to_one(tokenizer):
    reader = Reader(tokenizer, "s")
    size = reader.config.vocab_size
    (fillers,) = fill_mask(reader, tokenizer, "<mask>", top_k=size)
    assert sum(filler.probability for filler in fillers) == pytest.approx(1.0, abs=1e-4)
    for wrong in (0, -1, size + 1):
        with pytest.raises(ValueError, match=f"top_k {wrong}: accepted: 1 to {size}"):
            fill_mask(reader, tokenizer, "<mask>", top_k=wrong)


def test_a_text_without_a_mask_is_refused(tokenizer):
    with pytest.raises(ValueError, match="'the capital' has no <mask>"):
        fill_mask(Reader(tokenizer, "s"), tokenizer, "the capital")
