"""A step's batch as a pure function of corpus, lineage and step (law 1)."""

import dataclasses

import numpy as np
import pytest
import torch

from data_prep.corpus import Corpus
from pretrain.batches import Blocks, PretrainingBatches, validation_batches
from pretrain.config import FaultConfig, MaskingConfig
from pretrain.evaluate import summed_loss
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.masked import IGNORED, MaskedLM
from pretrain.order import Lineage, Segment

LENGTH = 64


@pytest.fixture(scope="module")
def blocks(corpus):
    return Blocks(Corpus(corpus, "train"), LENGTH)


@pytest.fixture(scope="module")
def validation(corpus):
    return Blocks(Corpus(corpus, "valid"), LENGTH)


@pytest.fixture(scope="module")
def objective(blocks):
    size = blocks.corpus.manifest.vocab_size
    return MaskedLM(MaskingConfig(), size - 1, size - 1)


@pytest.fixture(scope="module")
def batches(blocks, objective):
    lineage = Lineage((Segment(0, 1),))
    return PretrainingBatches(blocks, objective, lineage, 8, 2, FaultConfig(), 1)


def rows_of(batches, step, ranks):
    """What all ranks read in a step: a sorted list of (masked ids, places, labels) by block."""
    rows = []
    for rank in range(ranks):
        for batch in batches.micro_batches(step, rank, ranks):
            arrays, size = batch.arrays, len(batch.arrays["input_ids"])
            labels = arrays["labels"].reshape(size, -1)
            places = arrays["positions"].reshape(size, -1)
            for row in range(size):
                used = labels[row] != IGNORED
                rows.append(
                    (
                        tuple(arrays["input_ids"][row]),
                        tuple(places[row][used] - row * LENGTH),
                        tuple(labels[row][used]),
                    )
                )
    return sorted(rows)


def test_blocks_are_bos_and_whole_documents_and_none_is_lost(blocks):
    documents = []
    for block in range(len(blocks)):
        ids = blocks.ids(block)
        assert ids.dtype == np.int64
        assert ids[0] == 0
        assert ids[-1] == 2
        assert 2 <= len(ids) <= LENGTH
        documents.append(ids[1:])
    whole = np.concatenate([blocks.corpus.document(n) for n in range(len(blocks.corpus))])
    assert np.array_equal(np.concatenate(documents), whole)


def test_a_corpus_without_a_document_that_fits_is_refused(corpus):
    with pytest.raises(ValueError, match="fits into data.sequence_length 3; the shortest has"):
        Blocks(Corpus(corpus, "train"), 3)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 2), (2, 2), (2, 4), (4, 2), (8, 1)])
def test_the_global_batch_does_not_depend_on_ranks_or_micro_batches(ranks, micro, batches):
    split = dataclasses.replace(batches, micro_batch_size=micro)
    for step in (0, 3, 50):
        assert rows_of(split, step, ranks) == rows_of(batches, step, 1)


def test_ranks_take_turns_and_a_micro_batch_keeps_its_number(batches):
    """The number keys the dropout: the same micro-batch drops the same on any number of ranks."""
    alone = {batch.index: batch for batch in batches.micro_batches(7, 0, 1)}
    assert sorted(alone) == [0, 1, 2, 3]
    for rank in range(2):
        for batch in batches.micro_batches(7, rank, 2):
            same = alone[batch.index].arrays
            assert all(np.array_equal(batch.arrays[name], same[name]) for name in same)


def test_counts_are_of_real_tokens_and_of_labels(batches, blocks):
    total = sum(len(blocks.ids(int(b))) for b in batches.lineage.blocks(0, 8, len(blocks))[0])
    some = batches.micro_batches(0, 0, 1)
    assert sum(batch.tokens for batch in some) == total
    for batch in some:
        assert batch.targets == (batch.arrays["labels"] != IGNORED).sum()
        assert batch.tokens == (batch.arrays["input_ids"] != 1).sum()


def test_a_batch_may_cross_an_epoch_s_end_and_every_block_is_read_once_an_epoch(batches, blocks):
    total = len(blocks)
    assert total % 8
    steps = -(-2 * total // 8)
    chosen = np.concatenate([batches.lineage.blocks(8 * s, 8, total)[0] for s in range(steps)])
    for epoch in range(2):
        part = chosen[epoch * total : (epoch + 1) * total]
        assert np.array_equal(np.sort(part), np.arange(total))
    crossing = total // 8
    epochs = batches.lineage.blocks(8 * crossing, 8, total)[1]
    assert set(epochs.tolist()) == {0, 1}
    assert batches.epoch(crossing) < 1 < batches.epoch(crossing + 1)
    assert len(rows_of(batches, crossing, 1)) == 8


def test_a_block_is_masked_otherwise_in_another_epoch_and_under_another_seed(batches, blocks):
    def places(lineage, epoch):
        found = {}
        for step in range(epoch * len(blocks) // 8, -(-(epoch + 1) * len(blocks) // 8)):
            order, epochs = lineage.blocks(8 * step, 8, len(blocks))
            of_lineage = dataclasses.replace(batches, lineage=lineage)
            masked = [
                batch.arrays["positions"][batch.arrays["labels"] != IGNORED]
                for batch in of_lineage.micro_batches(step, 0, 1)
            ]
            if set(epochs.tolist()) == {epoch}:
                found[tuple(order)] = np.concatenate(masked)
        return found

    first = places(batches.lineage, 0)
    assert all(np.array_equal(first[key], places(batches.lineage, 0)[key]) for key in first)
    key = (3, 0, 5)
    ids = blocks.ids(5)
    drawn = [batches.objective.mask(ids, k)[1] for k in (key, (3, 1, 5), (4, 0, 5))]
    assert len({tuple(p) for p in drawn}) == 3


def test_after_a_reseed_batches_up_to_it_stay_and_later_ones_are_of_the_new_seed(batches):
    reseeded = dataclasses.replace(batches, lineage=batches.lineage.reseeded(3 * 8, 2))
    assert [reseeded.seed(step) for step in range(5)] == [1, 1, 1, 2, 2]
    for step in range(3):
        assert rows_of(reseeded, step, 1) == rows_of(batches, step, 1)
    assert rows_of(reseeded, 3, 1) != rows_of(batches, 3, 1)


def test_the_fault_spoils_the_labels_of_its_steps_until_a_reseed(batches):
    fault = FaultConfig("random-labels", 2, 4)
    struck = dataclasses.replace(batches, fault=fault)
    escaped = dataclasses.replace(struck, lineage=batches.lineage.reseeded(2 * 8, 9))
    healthy = dataclasses.replace(escaped, fault=FaultConfig())
    for step in range(6):
        ours, sound = struck.micro_batches(step, 1, 2), batches.micro_batches(step, 1, 2)
        for batch, expected in zip(ours, sound, strict=True):
            spoiled = batch.arrays["labels"] != expected.arrays["labels"]
            used = expected.arrays["labels"] != IGNORED
            assert not spoiled[~used].any()
            assert (spoiled[used].mean() > 0.9) if step in (2, 3) else not spoiled.any()
            assert np.array_equal(batch.arrays["input_ids"], expected.arrays["input_ids"])
            assert batch.targets == expected.targets
        assert rows_of(escaped, step, 2) == rows_of(healthy, step, 2)


@pytest.mark.parametrize("limit", [0, 1, 5, 7, 10_000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_validation_reads_the_same_blocks_on_any_number_of_ranks(
    limit, size, validation, objective
):
    def labels(ranks):
        parts = [
            validation_batches(validation, objective, limit, size, r, ranks) for r in range(ranks)
        ]
        assert len({len(part) for part in parts}) == 1  # ZeRO 3 needs equal numbers of passes
        return sorted(
            tuple(batch.arrays["labels"]) for part in parts for batch in part if batch.targets
        )

    alone = labels(1)
    count = min(limit or len(validation), len(validation))
    assert len(alone) == -(-count // size)
    assert labels(2) == labels(3) == alone


def test_validation_loss_is_the_same_for_one_and_for_two_ranks(validation, objective):
    torch.manual_seed(0)
    size = objective.mask_id + 1
    model = LanguageModel(presets.build("tiny", "zero-clap", size, {})).eval()

    def loss(ranks, micro):
        parts = [
            summed_loss(
                model, objective, validation_batches(validation, objective, 0, micro, r, ranks)
            )
            for r in range(ranks)
        ]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    alone, targets = loss(1, 2)
    for ranks, micro in [(2, 2), (3, 2), (2, 5)]:
        shared, count = loss(ranks, micro)
        assert count == targets
        assert shared == pytest.approx(alone, rel=1e-6)


def test_validation_masks_are_the_same_for_every_run(validation, objective):
    first = validation_batches(validation, objective, 4, 2, 0, 1)
    again = validation_batches(validation, objective, 4, 2, 0, 1)
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.arrays["input_ids"], other.arrays["input_ids"])
