"""Batches are pure functions of seed and step, and read every example once per epoch."""

import itertools

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from data_prep import tokenizer as tokenizers
from finetune.batches import EncodedExamples, ShuffledBatches, about_length, lay_out
from finetune.config import FinetuneConfig
from finetune.examples import Example
from finetune.tasks import Task
from pretrain.convert.model_folder import load_model
from pretrain.model.config import POSITION_METHODS, ModelConfig

TASK = Task("pairs")


@pytest.fixture(scope="module")
def encoded(tiny_model):
    words = ["the", "dog", "sees", "a", "small", "bird", "near", "the", "old", "house"]
    examples = [
        Example((" ".join(words[: 1 + number % 10]) + f" {number}",), number % 2)
        for number in range(23)
    ]
    return EncodedExamples(TASK, examples, load_model(tiny_model), 64)


def batches_of(encoded, *settings):
    return ShuffledBatches(encoded.lengths, encoded.collate, *settings)


def rows_of(batch):
    ids, mask = batch.arrays["input_ids"], batch.arrays["document_ids"]
    return [tuple(row[real].tolist()) for row, real in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("window", [1, 3, 50])
def test_an_epoch_reads_every_example_once_in_an_order_of_its_own_and_of_the_seed(encoded, window):
    batches = batches_of(encoded, 5, 1, window)
    read = [row for step in range(14) for row in rows_of(batches.micro_batches(step, 0, 1)[0])]
    everything = sorted(tuple(ids.tolist()) for ids in encoded.ids)
    for epoch in (0, 1, 2):
        # A batch that spans two epochs begins with the examples of the first.
        part = read[23 * epoch : 23 * (epoch + 1)]
        assert sorted(part) == everything
    assert read[:23] != read[23:46]
    assert batches.chosen(3) != batches_of(encoded, 5, 2, window).chosen(3)


@pytest.mark.parametrize("window", [1, 3, 50])
def test_batches_are_chosen_many_at_a_time_and_are_those_that_are_chosen_one_by_one(
    encoded, window, monkeypatch
):
    steps, calls, choose = [*range(0, 120, 5), 7, 119], [], ShuffledBatches._choose
    fresh = [batches_of(encoded, 5, 1, window).chosen(step) for step in steps]
    monkeypatch.setattr(
        ShuffledBatches, "_choose", lambda *arguments: calls.append(1) or choose(*arguments)
    )
    batches = batches_of(encoded, 5, 1, window)
    assert [batches.chosen(step) for step in steps] == fresh
    assert len(calls) == {1: 5, 3: 26, 50: 5}[window]


def test_windows_group_similar_lengths_without_a_trend(tiny_model):
    words = ["the", "dog", "sees", "a", "small", "bird", "near"] * 9
    examples = [Example((" ".join(words[: 1 + n * 7 % 60]),), 0) for n in range(640)]
    encoded = EncodedExamples(TASK, examples, load_model(tiny_model), 64)

    def padded(window):
        batches = batches_of(encoded, 8, 1, window)
        read = [batches.micro_batches(step, 0, 1)[0] for step in range(80)]
        sizes = [batch.arrays["input_ids"].size for batch in read]
        return sum(sizes), sizes

    alone, (together, sizes) = padded(1)[0], padded(40)
    real = int(encoded.lengths.sum())
    assert together - real < 0.2 * (alone - real)
    first, last = np.mean(sizes[:20]), np.mean(sizes[20:40])
    assert 0.5 < first / last < 2
    assert np.corrcoef(sizes[:40], sizes[40:])[0, 1] < 0.5  # each window is shuffled otherwise


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("shares", [(3, 3), (2, 2, 1, 1), (1,) * 6 + (0, 0)])
def test_ranks_share_a_batch_and_an_empty_share_does_not_count(encoded, window, shares):
    batches, ranks = batches_of(encoded, 6, 1, window), range(len(shares))
    for step in range(8):
        (whole,) = batches.micro_batches(step, 0, 1)
        (parts,) = zip(*(batches.micro_batches(step, r, len(shares)) for r in ranks), strict=True)
        assert [part.targets for part in parts] == [(share,) for share in shares]
        assert sorted(rows_of(whole)) == sorted(sum((rows_of(p) for p in parts if p.tokens), []))
        assert whole.tokens == sum(part.tokens for part in parts)
        assert len({part.index for part in parts}) == len(shares)  # their dropout differs
        assert {(part.seed, part.epoch) for part in parts} == {(1, 6 * step / len(encoded))}


def test_a_batch_is_padded_to_its_longest_example_and_counts_tokens(encoded):
    batch = encoded.collate([0, 9, 4])
    lengths = [len(encoded.ids[index]) for index in (0, 9, 4)]
    assert batch.arrays["input_ids"].shape == (3, max(lengths))
    assert (batch.tokens, batch.targets) == (sum(lengths), (3,))
    padding = ~batch.arrays["document_ids"]
    assert padding.sum() == 3 * max(lengths) - sum(lengths)
    assert set(batch.arrays["input_ids"][padding]) == {tokenizers.Tokenizer.pad_id}
    assert batch.arrays["labels"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("separators", [1, 2])
@pytest.mark.parametrize("max_tokens", [6, 7, 26, 27])
def test_texts_that_are_too_long_are_cut_as_by_tokenizers(tiny_model, separators, max_tokens):
    """One text, and two of all lengths up to some above the room."""
    theirs = Tokenizer(WordLevel({str(id): id for id in range(10, 70)}, "10"))
    theirs.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A {'</s> ' * separators}$B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    theirs.enable_truncation(max_tokens)
    tokenizer = tokenizers.load(tiny_model)
    for first, second in itertools.product(range(max_tokens + 2), repeat=2):
        pair = np.arange(10, 10 + first), np.arange(40, 40 + second)
        for texts in (pair, pair[:1]):
            words = [text.astype(str).tolist() for text in texts]
            expected = theirs.encode(*words, is_pretokenized=True)
            assert lay_out(texts, max_tokens, tokenizer, separators).tolist() == expected.ids


def test_models_with_segments_read_one_separator_and_the_segment_of_each_token(
    segment_model, tiny_model
):
    loaded = load_model(segment_model)
    tokenizer = loaded.tokenizer
    examples = [Example(("the dog", "a small bird")), Example(("the",)), Example(("the", "a"))]
    encoded = EncodedExamples(TASK, examples, loaded, 64)
    batch = encoded.collate([0, 1, 2]).arrays
    first, second = map(len, tokenizer.encode_batch(examples[0].texts))
    assert batch["segment_ids"][0].tolist() == [0] * (first + 2) + [1] * (second + 1)
    assert not batch["segment_ids"][1][: encoded.lengths[1]].any()
    assert set(batch["segment_ids"].flat) == {0, 1}  # at padding too
    assert (batch["input_ids"] == tokenizer.eos_id).sum(axis=1).tolist() == [2, 1, 2]
    without = EncodedExamples(TASK, examples, load_model(tiny_model), 64)
    assert "segment_ids" not in without.collate([0]).arrays


@pytest.mark.parametrize("method", POSITION_METHODS)
def test_what_happens_beyond_the_length_of_training_is_said(method):
    fields = {"position": method, "max_positions": 64, "hidden_size": 32, "num_heads": 4}
    config = ModelConfig(vocab_size=300, num_layers=1, intermediate_size=64, **fields)
    longest = 64 if method == "learned" else 512
    assert about_length(512, 32, config) == (
        f"inputs may be longer ({longest} tokens) than in pretraining (32); without ALiBi a model "
        "gets worse on longer ones"
    )
    assert about_length(32, 32, config) == "inputs have at most 32 tokens"
    if method == "learned":
        ends = "inputs have at most 64 tokens, where the learned positions end"
        assert about_length(512, 64, config) == ends


def test_a_long_example_is_left_out_of_training_and_cut_in_scoring(tiny_model):
    loaded = load_model(tiny_model)
    long = "the dog sees a small bird"
    for texts in ((long, "the"), ("the", long)):  # whichever text is cut
        assert EncodedExamples(TASK, [Example(texts)], loaded, 8).too_long == 1
    examples = [Example((long,), 1), Example(("the",), 0)]
    cut = EncodedExamples(TASK, examples, loaded, 6)
    assert (len(cut), cut.too_long, len(cut.ids[0])) == (2, 1, 6)
    dropped = EncodedExamples(TASK, examples, loaded, 6, drop_long=True)
    assert (len(dropped), dropped.too_long, dropped.labels[0]) == (1, 1, 0)
    with pytest.raises(ValueError, match="max_tokens 6: every example is longer"):
        EncodedExamples(TASK, examples[:1], loaded, 6, drop_long=True)


def test_every_epoch_ends_once_and_the_last_one_with_the_last_step(encoded):
    for batch_size in (1, 5, 16, 23):
        steps = FinetuneConfig(epochs=4, batch_size=batch_size).steps(len(encoded))
        batches = batches_of(encoded, batch_size, 1)
        ends = [step for step in range(1, steps + 1) if batches.ends_epoch(step)]
        assert [int(batches.epoch(step)) for step in ends] == [1, 2, 3, 4]
        assert ends[-1] == steps
