"""Blocks of sentences: each sentence at most once, at least two a block, and no more than fit."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from data_prep.corpus import Corpus
from pretrain.data.sentence_pairs import SentencePairs, sentence_runs
from tests.fixtures import prepared

bounded = settings(max_examples=100, derandomize=True, deadline=None, database=None)
LENGTH = 64
ROOM = LENGTH - 3


@pytest.fixture(scope="module")
def source(sentence_corpus):
    return SentencePairs(Corpus(sentence_corpus, "train"), LENGTH)


@bounded
@given(some.lists(some.lists(some.integers(1, 20), min_size=1), max_size=12), some.integers(2, 40))
def test_every_sentence_of_a_document_of_several_is_in_one_run_of_at_least_two(documents, room):
    lengths = np.array([*itertools.chain(*documents)], dtype=np.int32)
    bounds = np.cumsum([0, *map(len, documents)])
    runs, of_documents = sentence_runs(lengths, bounds, room)
    expected = [
        *itertools.chain(
            *(range(a, b) for a, b in itertools.pairwise(bounds.tolist()) if b - a > 1)
        )
    ]
    read = [*itertools.chain(*(range(first, end) for first, end in runs.tolist()))]
    assert read == expected
    for (first, end), document in zip(runs.tolist(), of_documents.tolist(), strict=True):
        assert bounds[document] <= first < end <= bounds[document + 1]
        assert end - first >= 2
        fits = lengths[first:end].sum() <= room
        # The third sentence is the last one that was cut, which would be alone otherwise.
        last = first == bounds[document] if document % 2 else end == bounds[document + 1]
        assert fits or end - first == 2 or (end - first == 3 and last)
    again, _ = sentence_runs(lengths, bounds, room)
    assert np.array_equal(runs, again)


def test_nine_of_ten_runs_are_as_long_as_fits_and_the_others_have_any_length():
    sentences, room = 200_000, 100
    lengths = np.random.default_rng(1).integers(1, 12, sentences)
    runs, _ = sentence_runs(lengths, np.array([0, sentences]), room)
    totals = np.add.reduceat(lengths, runs[:, 0])
    following = lengths[runs[:-1, 1]]
    full = totals[:-1] + following > room
    assert full.mean() == pytest.approx(0.9 + 0.1 * 0.06, abs=0.01)
    short = totals[:-1][~full]
    # A target of T holds T - 3 tokens on average, from a target below 95 to one of 12.
    assert np.histogram(short, [0, 20, 40, 60, 80])[0] / len(short) == pytest.approx(0.22, abs=0.04)


def test_the_lengths_of_a_run_s_sentences_do_not_tell_which_came_first():
    """The longer half of a run is as often the first as the second; it was the first in 57 %."""
    draw, documents = np.random.default_rng(1), 4000
    lengths = np.maximum(1, draw.gamma(2.0, 12.0, 40 * documents)).astype(np.int32)
    runs, _ = sentence_runs(lengths, np.arange(0, 40 * documents + 1, 40), 125)
    longer = []
    for first, end in runs.tolist():
        cut = int(draw.integers(first + 1, end))
        sizes = lengths[first:cut].sum(), lengths[cut:end].sum()
        if sizes[0] != sizes[1]:
            longer.append(sizes[0] > sizes[1])
    assert np.mean(longer) == pytest.approx(0.5, abs=4 * 0.5 / len(longer) ** 0.5)


def test_blocks_are_the_sentences_of_their_document(source):
    for index, block in enumerate(source):
        (document,), (first,) = source.parts(index)
        sentences = source.corpus.sentences(document)[first : source._tables["ranges"][index, 1]]
        assert block.sentences.tolist() == [len(ids) for ids in sentences]
        assert block.ids.tolist() == np.concatenate(sentences).tolist()
        assert block.ids.dtype == np.int64


def test_documents_of_one_sentence_and_what_is_cut_are_missing_from_the_share(source):
    corpus = source.corpus
    sizes = [len(block.ids) for block in source]
    assert max(sizes) > ROOM
    held = {*source._tables["documents"].tolist()}
    counts = [len(corpus.sentences(document)) for document in range(len(corpus))]
    assert held == {document for document, count in enumerate(counts) if count > 1}
    assert 1 in counts
    read = sum(min(size, ROOM) for size in sizes)
    assert source.share_of_tokens == (read + len(held)) / corpus.lengths.sum()
    assert 0.3 < source.share_of_tokens < 1
    assert source.fill == pytest.approx((read + 3 * len(sizes)) / (len(sizes) * LENGTH))


def test_a_number_chooses_among_all_blocks_of_other_documents(source):
    documents = source._tables["documents"].tolist()
    for index in (0, len(source) // 2, len(source) - 1):
        others = [n for n in range(len(source)) if documents[n] != documents[index]]
        shares = (np.arange(len(others)) + 0.5) / len(others)
        assert [source._other_document(index, share) for share in shares] == others
        assert source._other_document(index, np.nextafter(1.0, 0.0)) == others[-1]
        chosen = source[index].sample_other_document(shares[3])
        assert chosen.ids.tolist() == source[others[3]].ids.tolist()


@pytest.fixture
def of_sentences(corpus, tmp_path):
    """`of_sentences(texts)`: the split of these documents, prepared with --sentences."""
    words = ["--sentences", "--valid-fraction", "0"]
    return lambda texts: Corpus(prepared(tmp_path / "corpus", texts, corpus, *words), "train")


def test_a_split_without_two_sentences_in_a_document_is_refused(of_sentences):
    with pytest.raises(ValueError, match="no document of split 'train' has two sentences"):
        SentencePairs(of_sentences(["Only one.", "", "Another one"]), LENGTH)


def test_a_split_of_one_document_has_no_segments_of_others(of_sentences):
    source = SentencePairs(of_sentences(["One. Two. Three.", "Alone."]), LENGTH)
    with pytest.raises(ValueError, match="are of one document.*objective.pair_task=sop"):
        source[0].sample_other_document(0.5)


def test_a_corpus_without_sentences_and_blocks_without_room_are_refused(corpus, sentence_corpus):
    with pytest.raises(ValueError, match=f"{corpus}: its sequences are documents.*--sentences"):
        SentencePairs(Corpus(corpus, "train"), LENGTH)
    with pytest.raises(ValueError, match="data.sequence_length 4: accepted .* 5 or more"):
        SentencePairs(Corpus(sentence_corpus, "train"), 4)
    assert len(SentencePairs(Corpus(sentence_corpus, "train"), 5))
