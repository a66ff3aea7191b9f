"""A step's batch as a pure function of corpus, lineage and step (law 1)."""

import dataclasses

import numpy as np
import pytest

from data_prep.corpus import Corpus
from pretrain.config.run import Sizes
from pretrain.config.sections import BatchConfig, FaultConfig
from pretrain.data.batches import check_packing, validation_batches
from pretrain.data.lineage import digest
from pretrain.data.mixture import Mixture
from pretrain.data.order import Order
from pretrain.data.sentence_pairs import SentencePairs
from pretrain.data.sources import SOURCES, BestFitBlocks, CompleteBlocks, ConcatenatedBlocks
from pretrain.objectives.base import Vocabulary
from pretrain.objectives.causal import CausalLM, CausalLMConfig
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig
from pretrain.objectives.spans import SpanCorruptionConfig
from pretrain.objectives.tokens import FIRST_WORD_ID, IGNORED
from tests.pretrain.builders import batches_of

LENGTH = 64


@pytest.fixture(scope="module")
def blocks(corpus):
    return CompleteBlocks(Corpus(corpus, "train"), LENGTH)


@pytest.fixture(scope="module")
def packed(corpus):
    return BestFitBlocks(Corpus(corpus, "train"), LENGTH)


@pytest.fixture(scope="module")
def validation(corpus):
    return CompleteBlocks(Corpus(corpus, "valid"), LENGTH)


@pytest.fixture(scope="module")
def objective(blocks):
    size = blocks.corpus.manifest.vocab_size
    return MaskedLM(MaskedLMConfig(), size - 1, size - 1)


@pytest.fixture(scope="module")
def batches(blocks, objective):
    return batches_of(blocks, objective, BatchConfig(8, 2))


@pytest.fixture(
    scope="module",
    params=[
        ("complete", MaskedLMConfig()),
        ("contiguous", CausalLMConfig()),
        ("one-document", SpanCorruptionConfig()),
    ],
    ids=lambda param: param[1].name,
)
def any_batches(request, corpus):
    """Of each objective that predicts tokens of documents."""
    packing, settings = request.param
    blocks = SOURCES[packing](Corpus(corpus, "train"), LENGTH)
    size = blocks.corpus.manifest.vocab_size
    objective = settings.build(Vocabulary(size, size, corpus))
    return batches_of(blocks, objective, BatchConfig(8, 2))


@pytest.fixture(scope="module", params=["sop", "nsp"])
def pair_batches(request, sentence_corpus):
    blocks = SentencePairs(Corpus(sentence_corpus, "train"), LENGTH)
    size = blocks.corpus.manifest.vocab_size
    settings = SentencePairsConfig(pair_task=request.param)
    pairs = settings.build(Vocabulary(size, size - 1, sentence_corpus))
    return batches_of(blocks, pairs, BatchConfig(8, 2))


def rows_of(batches, step, ranks):
    """All rows of a global batch that count, sorted: (masked ids, positions to predict, labels)."""
    shares = [batches.micro_batches(step, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1, "every rank has equally many"
    assert len({batch.index for batch in sum(shares, [])}) == len(sum(shares, [])), "dropout keys"
    rows = []
    for batch in sum(shares, []):
        assert bool(batch.tokens) == any(batch.targets), "an empty one has no tokens to count"
        if any(batch.targets):
            arrays, size = batch.arrays, len(batch.arrays["input_ids"])
            labels = arrays["labels"].reshape(size, -1)
            positions = arrays["target_positions"].reshape(size, -1)
            for row in range(size):
                used = labels[row] != IGNORED
                places = positions[row][used] - row * LENGTH
                parts = arrays["input_ids"][row], places, labels[row][used]
                rows.append(tuple(map(tuple, parts)))
    return sorted(rows)


def test_a_packed_batch_numbers_its_documents_and_counts_tokens_without_padding(packed, objective):
    read = batches_of(packed, objective, BatchConfig(8, 4)).micro_batches(3, 0, 1)
    assert len(read) == 2
    for batch in read:
        mask, ids = batch.arrays["document_ids"], batch.arrays["input_ids"]
        assert mask.dtype == np.int32
        assert batch.tokens == (mask > 0).sum()
        assert (ids[mask == 0] == 1).all()
        starts = np.diff(mask, axis=1, prepend=0) > 0
        assert starts[:, 0].all()
        used = batch.arrays["target_positions"][batch.arrays["labels"] != IGNORED]
        assert (mask.ravel()[used] > 0).all()


@pytest.mark.parametrize("packing", [n for n in SOURCES if not SOURCES[n].pairs])
def test_each_target_has_the_subset_of_its_document(packing, corpus, objective):
    blocks = SOURCES[packing](Corpus(corpus, "valid"), LENGTH)
    blocks.corpus.__dict__["subsets"] = np.arange(len(blocks.corpus), dtype=np.uint8) % 3
    count = min(6, len(blocks))
    spread = [number * len(blocks) // count for number in range(count)]
    first = next(validation_batches(blocks, objective, 6, 2, 0, 1)).arrays
    assert (first["labels"] != IGNORED).sum() > 5
    for position, subset, label in zip(
        first["target_positions"], first["subsets"], first["labels"], strict=True
    ):
        if label != IGNORED:
            row, column = divmod(int(position), LENGTH)
            assert subset == blocks.subsets(spread[row])[column]


def test_the_other_kind_of_packing_is_refused(pair_batches, blocks, objective):
    for source, other, message in [
        (blocks, pair_batches.objective, "packing complete .* sentence-pairs, .* sentence-pairs$"),
        (pair_batches.source, objective, "packing sentence-pairs .* masked-lm, .* no .* chunked"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_packing(type(source), other.settings)
    check_packing(SentencePairs, pair_batches.objective.settings)


@pytest.mark.parametrize("packing", SOURCES)
def test_an_objective_that_reads_one_text_a_block_refuses_documents_that_are_apart(packing):
    settings = SpanCorruptionConfig()
    if packing in ("complete", "contiguous", "one-document"):
        check_packing(SOURCES[packing], settings)
        return
    reads = "no pairs of segments" if packing == "sentence-pairs" else "a block as one text"
    message = f"{packing} .* span-corruption, .* {reads}; .* complete or contiguous or one-document"
    with pytest.raises(ValueError, match=message):
        check_packing(SOURCES[packing], settings)


@pytest.mark.parametrize(
    ("ranks", "micro"), [(1, 8), (1, 2), (2, 2), (2, 4), (3, 2), (5, 1), (8, 1)]
)
def test_the_global_batch_does_not_depend_on_ranks_or_micro_batches(ranks, micro, any_batches):
    split = dataclasses.replace(any_batches, batch=BatchConfig(8, micro))
    for step in (0, 3, 50):
        assert rows_of(split, step, ranks) == rows_of(any_batches, step, 1)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (2, 2), (3, 2), (8, 1)])
def test_the_pairs_of_a_global_batch_do_not_depend_on_ranks_or_micro_batches(
    ranks, micro, pair_batches
):
    def pairs(batches, step, ranks):
        found = [b for rank in range(ranks) for b in batches.micro_batches(step, rank, ranks)]
        found = [batch for batch in found if any(batch.targets)]
        arrays = [batch.arrays for batch in sorted(found, key=lambda batch: batch.index)]
        assert sum(batch.tokens for batch in found) == sum(
            int((each["input_ids"] != 1).sum()) for each in arrays
        )
        names = ("input_ids", "document_ids", "segment_ids", "pair_labels", "labels")
        return [np.concatenate([each[name] for each in arrays]).tolist() for name in names]

    split = dataclasses.replace(pair_batches, batch=BatchConfig(8, micro))
    for step in (0, 7):
        assert pairs(split, step, ranks) == pairs(pair_batches, step, 1)
        assert rows_of(split, step, ranks) == rows_of(pair_batches, step, 1)


def test_ranks_take_turns_and_a_micro_batch_keeps_its_index(any_batches):
    """The index keys the dropout: it is the same for a micro-batch on any number of ranks."""
    alone = {batch.index: batch for batch in any_batches.micro_batches(7, 0, 1)}
    assert sorted(alone) == [0, 1, 2, 3]
    for rank in range(2):
        for batch in any_batches.micro_batches(7, rank, 2):
            same = alone[batch.index].arrays
            assert all(np.array_equal(batch.arrays[name], same[name]) for name in same)


def test_a_block_is_masked_differently_in_another_epoch_or_with_another_seed(batches, blocks):
    def positions(order):
        """The masked positions of each (epoch, block)."""
        found, alone = {}, dataclasses.replace(batches, order=order, batch=BatchConfig(8, 1))
        for step in range(2 * len(blocks) // 8):
            chosen, epochs = order.blocks(8 * step, 8)
            read = alone.micro_batches(step, 0, 1)
            for block, epoch, batch in zip(chosen, epochs, read, strict=True):
                used = batch.arrays["labels"] != IGNORED
                found[epoch, block] = tuple(batch.arrays["target_positions"][used])
        return found

    first, other_seed = positions(batches.order), positions(batches.order.rolled_back(0, 2))
    long = [n for n in range(len(blocks)) if len(blocks[n].ids) > 20 and (1, n) in first]
    assert len(long) > 20
    for block in long:
        assert first[0, block] != first.get((1, block)) != other_seed[0, block] != first[0, block]


def test_the_fault_makes_the_labels_of_its_steps_random_until_a_reseed(any_batches):
    batches = any_batches
    fault = FaultConfig([2, 4])
    struck = dataclasses.replace(batches, fault=fault)
    escaped = dataclasses.replace(struck, order=batches.order.rolled_back(2 * 8, 9))
    healthy = dataclasses.replace(escaped, fault=FaultConfig())
    for step in range(6):
        ours, sound = struck.micro_batches(step, 1, 2), batches.micro_batches(step, 1, 2)
        for batch, expected in zip(ours, sound, strict=True):
            random = batch.arrays["labels"] != expected.arrays["labels"]
            used = expected.arrays["labels"] != IGNORED
            assert not random[~used].any()
            assert (random[used].mean() > 0.9) if step in (2, 3) else not random.any()
            assert (batch.arrays["labels"][random] >= FIRST_WORD_ID).all()
            assert (batch.arrays["labels"][random] < batches.objective.replacement_end).all()
            assert np.array_equal(batch.arrays["input_ids"], expected.arrays["input_ids"])
            assert batch.targets == expected.targets
        assert rows_of(escaped, step, 2) == rows_of(healthy, step, 2)


def test_the_damaged_block_enlarges_the_gradient_with_any_seed_until_it_is_skipped(batches):
    """On every rank. In the second epoch, for which a skip does not hold, it does not."""
    steps = range(2 * len(batches.source) // 8)
    struck = dataclasses.replace(batches, fault=FaultConfig(damaged_block=5))
    block = batches.order.blocks(5 * 8, 1)[0][0]

    def enlarged(order):
        found = dataclasses.replace(struck, order=order)
        by_rank = [
            {(s, b.gradient_scale) for s in steps for b in found.micro_batches(s, rank, 2)}
            for rank in (0, 1)
        ]
        assert by_rank[0] == by_rank[1]
        assert {scale for _, scale in by_rank[0]} <= {1.0, 1e4}
        return [step for step, scale in sorted(by_rank[0]) if scale > 1]

    assert enlarged(batches.order) == [5]
    reseeded = batches.order.rolled_back(2 * 8, 9)
    (moved,) = enlarged(reseeded)
    read, epochs = reseeded.blocks(8 * moved, 8)
    assert [*epochs[read == block]] == [0]
    assert moved != 5
    assert enlarged(reseeded.rolled_back(2 * 8, 10, skip=(moved * 8, (moved + 1) * 8))) == []


GROWING = Sizes(((0, 4), (3, 8), (6, 12)))


@pytest.fixture
def growing(blocks, objective):
    """Batches of a run whose batch grows."""
    return dataclasses.replace(batches_of(blocks, objective, BatchConfig(12, 2)), sizes=GROWING)


def test_the_first_block_of_a_step_is_the_sum_of_the_sizes_before():
    sizes = [GROWING.size(step) for step in range(20)]
    assert sizes == [4] * 3 + [8] * 3 + [12] * 14
    assert [GROWING.first_block(step) for step in range(20)] == [sum(sizes[:n]) for n in range(20)]
    assert GROWING.first_block(10**15) == 12 * 10**15 - 3 * 8 - 3 * 4


def test_a_growing_batch_reads_every_block_once_per_epoch_also_where_it_crosses_epochs(
    blocks, growing
):
    """Its digest is on any rank the one that an audit computes from the lineage alone."""
    total, read, step, crossings = len(blocks), [], 0, 0
    while len(read) < 2 * total:
        some = [b for rank in (0, 1) for b in growing.micro_batches(step, rank, 2)]
        first, size = GROWING.first_block(step), GROWING.size(step)
        assert len(some) == size // 2
        chosen, epochs = growing.order.blocks(first, size)
        assert {batch.batch_digest for batch in some} == {digest(chosen, epochs)}
        assert len(rows_of(growing, step, 1)) == size
        assert {batch.epoch for batch in some} == {len(read) / total}
        read += chosen.tolist()
        crossings += epochs[0] < epochs[-1]
        step += 1
    assert crossings or total % GROWING.size(10**9) == 0
    for epoch in range(2):
        assert sorted(read[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_after_a_rollback_the_seed_changes_at_the_first_block_of_the_step(growing):
    lineage = growing.order.rolled_back(GROWING.first_block(5), 9)
    again = dataclasses.replace(growing, order=lineage)
    assert [again.micro_batches(step, 0, 1)[0].seed for step in (0, 4, 5, 6)] == [1, 1, 9, 9]
    assert rows_of(again, 4, 1) == rows_of(growing, 4, 1)
    assert rows_of(again, 5, 1) != rows_of(growing, 5, 1)


@pytest.mark.parametrize("limit", [0, 1, 5, 7, 10_000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_validation_reads_the_same_rows_on_any_number_of_ranks(limit, size, validation, objective):
    """Whatever the micro-batch, too: a block's masks are the same for every run."""

    def rows(size, ranks):
        parts = [
            list(validation_batches(validation, objective, limit, size, r, ranks))
            for r in range(ranks)
        ]
        assert len({len(part) for part in parts}) == 1  # ZeRO 3 needs equal numbers of passes
        read = [batch for part in parts for batch in part if any(batch.targets)]
        return sorted(tuple(row) for batch in read for row in batch.arrays["input_ids"].tolist())

    alone = rows(4, 1)
    assert len(alone) == min(limit or len(validation), len(validation))
    assert all(objective.mask_id in row for row in alone)
    assert rows(size, 1) == rows(size, 2) == rows(size, 3) == alone


def test_a_mixture_reads_each_corpus_in_its_order_whatever_the_ranks(
    packed, other_corpus, objective
):
    """Law 1 for two corpora and a change of their weights at step 3."""
    other = BestFitBlocks(Corpus(other_corpus, "train"), LENGTH)
    size = BatchConfig(8, 2)
    mixture = Mixture.by_step([(0, [3, 1]), (3, [0, 1])], Sizes(((0, 8),)).first_block)
    order = Order.begin(mixture, [len(packed), len(other)], 1)
    joined = ConcatenatedBlocks((packed, other), LENGTH)
    tokens = [int(each.corpus.lengths.sum()) for each in joined.sources]
    assert joined.share_of_tokens * sum(tokens) == pytest.approx(
        packed.share_of_tokens * tokens[0] + other.share_of_tokens * tokens[1]
    )
    made = batches_of(joined, objective, size, order)
    causal = CausalLM(CausalLMConfig(), objective.replacement_end)
    plain = dataclasses.replace(made, objective=causal)
    draws = [0, 0]
    for step in range(6):
        assert rows_of(made, step, 2) == rows_of(made, step, 1)
        found = [batch.arrays["input_ids"] for batch in plain.micro_batches(step, 0, 1)]
        rows = sorted(tuple(row[row != 1]) for row in np.concatenate(found))
        counts = [6, 2] if step < 3 else [0, 8]
        expected = []
        for corpus, source in enumerate((packed, other)):
            blocks, _ = order.lineages[corpus].blocks(draws[corpus], counts[corpus])
            expected += [tuple(source[block].ids) for block in blocks.tolist()]
            draws[corpus] += counts[corpus]
        assert rows == sorted(expected)
