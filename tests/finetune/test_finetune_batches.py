"""Batches: pure functions of seed and step that read every example once an epoch."""

import numpy as np
import pytest

from data_prep import tokenizer as tokenizers
from finetune.batches import EncodedExamples, ShuffledBatches
from finetune.config import FinetuneConfig
from finetune.glue import Example


@pytest.fixture(scope="module")
def encoded(tiny_model):
    words = ["the", "dog", "sees", "a", "small", "bird", "near", "the", "old", "house"]
    examples = [
        Example(" ".join(words[: 1 + number % 10]) + f" {number}", number % 2)
        for number in range(23)
    ]
    return EncodedExamples(examples, tokenizers.load(tiny_model), 64)


def rows_of(batch):
    ids, mask = batch.arrays["input_ids"], batch.arrays["attention_mask"]
    return [tuple(row[real].tolist()) for row, real in zip(ids, mask, strict=True)]


def test_an_epoch_reads_every_example_once_though_batches_cross_its_end(encoded):
    batches = ShuffledBatches(encoded, batch_size=5, order_seed=1)
    read = [row for step in range(14) for row in rows_of(batches.micro_batches(step, 0, 1)[0])]
    everything = sorted(tuple(ids.tolist()) for ids in encoded.ids)
    first, second = read[:23], read[23:46]
    assert sorted(first) == sorted(second) == everything
    assert first != second


def test_a_batch_depends_on_seed_and_step_alone(encoded):
    def batch(seed, step):
        return rows_of(ShuffledBatches(encoded, 5, seed).micro_batches(step, 0, 1)[0])

    assert batch(1, 3) == batch(1, 3)
    assert batch(1, 3) != batch(2, 3)


def test_a_batch_is_padded_to_its_longest_example_and_counts_what_is_real(encoded):
    batch = encoded.collate([0, 9, 4])
    lengths = [len(encoded.ids[index]) for index in (0, 9, 4)]
    assert batch.arrays["input_ids"].shape == (3, max(lengths))
    assert (batch.tokens, batch.targets) == (sum(lengths), 3)
    padding = ~batch.arrays["attention_mask"]
    assert padding.sum() == 3 * max(lengths) - sum(lengths)
    assert set(batch.arrays["input_ids"][padding]) == {encoded.pad_id}
    assert batch.arrays["labels"].tolist() == [0, 1, 0]


def test_too_long_an_example_loses_its_end_but_not_its_marks(tiny_model):
    tokenizer = tokenizers.load(tiny_model)
    (whole,) = tokenizer.encode_batch(["the dog sees a small bird"])
    examples = [Example("the dog sees a small bird", 1), Example("the", 0)]
    encoded = EncodedExamples(examples, tokenizer, 5)
    assert encoded.ids[0].tolist() == [0, *whole[:3].tolist(), 2]
    assert encoded.cut == 1


def test_every_epoch_ends_once_and_the_last_with_the_last_step(encoded):
    for batch_size in (1, 5, 16, 23):
        steps = FinetuneConfig(epochs=4, batch_size=batch_size).steps(len(encoded))
        batches = ShuffledBatches(encoded, batch_size, 1)
        ends = [step for step in range(1, steps + 1) if batches.ends_epoch(step)]
        assert [int(batches.epoch(step)) for step in ends] == [1, 2, 3, 4]
        assert ends[-1] == steps


def test_batches_by_length_hold_every_example_once(encoded):
    chosen = encoded.by_length(6)
    assert sorted(sum(chosen, [])) == list(range(23))
    lengths = [len(encoded.ids[index]) for batch in chosen for index in batch]
    assert lengths == sorted(lengths)
    assert np.diff([len(batch) for batch in chosen]).tolist() == [0, 0, -1]
