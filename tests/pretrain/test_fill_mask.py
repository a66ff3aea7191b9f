"""The most likely fillers of a mask."""

import pytest
import torch

from data_prep import tokenizer as tokenizers
from pretrain.fill_mask import fill_mask
from pretrain.model import presets


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return tokenizers.load(corpus)


class Reader:
    """Stands where a model does: remembers what it reads, and likes given words."""

    def __init__(self, tokenizer, *likes):
        self.config = presets.build("tiny", "zero-clap", tokenizer.vocab_size, {})
        self.likes = [tokenizer.encode_batch([word])[0].tolist()[0] for word in likes]
        self.read = None

    def __call__(self, ids, attention_mask, places):
        self.read = ids[0].tolist()
        logits = torch.zeros(len(places), self.config.vocab_size)
        for mask in range(len(places)):
            logits[mask, self.likes[mask]] = 9.0
        return logits


def test_a_space_before_the_mask_belongs_to_the_filler(tokenizer):
    reader = Reader(tokenizer, " the")
    ((filler,),) = fill_mask(reader, tokenizer, "of <mask> value", top_k=1)
    assert (filler.token, filler.text) == (" the", "of the value")
    of, value = tokenizer.encode_batch(["of", " value"])
    assert reader.read == [0, *of, tokenizer.mask_id, *value, 2]
    assert filler.probability == pytest.approx(
        float(torch.tensor([9.0] + [0.0] * (reader.config.vocab_size - 1)).softmax(0)[0])
    )


def test_a_filler_without_a_space_leaves_the_text_its_own(tokenizer):
    reader = Reader(tokenizer, "s")
    ((filler,),) = fill_mask(reader, tokenizer, "of <mask>.", top_k=1)
    assert (filler.token, filler.text) == ("s", "of s.")
    ((filler,),) = fill_mask(reader, tokenizer, "value<mask>.", top_k=1)
    assert filler.text == "values."


def test_each_of_several_masks_is_filled_with_the_others_left(tokenizer):
    reader = Reader(tokenizer, "s", " the", ".")
    fillers = fill_mask(reader, tokenizer, "<mask> of <mask> value<mask>", top_k=2)
    assert [len(of_mask) for of_mask in fillers] == [2, 2, 2]
    assert [of_mask[0].text for of_mask in fillers] == [
        "s of <mask> value<mask>",
        "<mask> of the value<mask>",
        "<mask> of <mask> value.",
    ]
    assert reader.read.count(tokenizer.mask_id) == 3
    for likeliest, other in fillers:
        assert likeliest.probability > other.probability


def test_the_text_cannot_write_special_tokens(tokenizer):
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
        with pytest.raises(ValueError, match=f"top_k: {wrong} is not between 1 and {size}"):
            fill_mask(reader, tokenizer, "<mask>", top_k=wrong)


def test_a_text_without_a_mask_is_refused(tokenizer):
    with pytest.raises(ValueError, match="'the capital' holds no <mask>"):
        fill_mask(Reader(tokenizer, "s"), tokenizer, "the capital")
