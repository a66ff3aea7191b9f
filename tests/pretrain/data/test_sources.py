"""A split as blocks: every document that fits, once, and special tokens where they belong."""

import pickle
import shutil

import numpy as np
import pytest

from data_prep.corpus import Corpus
from pretrain.data.sources import SOURCES, BestFitBlocks, CompleteBlocks

LENGTH = 64


@pytest.fixture(scope="module")
def complete(corpus):
    return CompleteBlocks(Corpus(corpus, "train"), LENGTH)


@pytest.fixture(scope="module")
def packed(corpus):
    return BestFitBlocks(Corpus(corpus, "train"), LENGTH)


def test_complete_blocks_are_bos_and_whole_documents_and_none_is_lost(complete):
    documents = []
    for block in complete:
        assert block.document_ids is None
        assert block.ids.dtype == np.int64
        assert block.ids[0] == 0
        assert block.ids[-1] == 2
        assert 2 <= len(block.ids) <= LENGTH
        documents.append(block.ids[1:])
    whole = np.concatenate([complete.corpus.document(n) for n in range(len(complete.corpus))])
    assert np.array_equal(np.concatenate(documents), whole)


def test_packed_blocks_hold_each_document_once_with_its_own_start(packed):
    seen = []
    for index, block in enumerate(packed):
        documents = packed.documents(index).tolist()
        assert len(block.ids) == len(block.document_ids) <= LENGTH
        for number, document in enumerate(documents, start=1):
            expected = [0, *packed.corpus.document(document)]
            assert block.ids[block.document_ids == number].tolist() == expected
        seen += documents
    assert sorted(seen) == list(range(len(packed.corpus)))


def test_packed_blocks_are_fewer_and_fuller(packed, complete):
    assert len(packed) < len(complete)
    for source in (packed, complete):
        tokens = sum(len(block.ids) for block in source)
        assert source.fill == pytest.approx(tokens / (len(source) * LENGTH))
        assert source.share_of_tokens == 1.0
    assert packed.fill > 0.9 > complete.fill


@pytest.mark.parametrize("name", SOURCES)
def test_sizes_and_subsets_are_those_of_the_ids(name, corpus):
    source = SOURCES[name](Corpus(corpus, "valid"), LENGTH)
    source.corpus.__dict__["subsets"] = np.arange(len(source.corpus), dtype=np.uint8) % 3
    for index, block in enumerate(source):
        assert source.size(index) == len(source.subsets(index)) == len(block.ids)
        # A document ends with </s>, and the next one, with its <s> if it has one, follows.
        number = np.cumsum(np.concatenate([[0], block.ids[:-1] == 2]))
        assert np.array_equal(source.subsets(index), source.documents(index)[number] % 3)


@pytest.mark.parametrize("name", SOURCES)
def test_how_a_split_is_cut_is_kept_and_read_again(name, corpus, tmp_path, monkeypatch):
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder, ignore=shutil.ignore_patterns("blocks"))
    first = SOURCES[name](Corpus(folder, "train"), LENGTH)
    assert len(list((folder / "blocks").iterdir())) == 1
    for function in ("complete", "best_fit"):
        monkeypatch.delattr(f"pretrain.data.sources.{function}")  # nothing is computed again
    again = SOURCES[name](Corpus(folder, "train"), LENGTH)
    assert len(again) == len(first)
    assert all(np.array_equal(again.documents(n), first.documents(n)) for n in range(len(first)))


def test_blocks_pickle_small_and_come_back(packed):
    again = pickle.loads(pickle.dumps(packed))
    assert len(pickle.dumps(packed)) < 20_000
    assert len(again) == len(packed)
    assert np.array_equal(again[3].ids, packed[3].ids)


def test_a_corpus_that_cannot_be_written_to_is_cut_by_each_process(corpus, tmp_path):
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder, ignore=shutil.ignore_patterns("blocks"))
    (folder / "blocks").write_text("a file where the folder would be")
    assert len(BestFitBlocks(Corpus(folder, "train"), LENGTH)) > 0


def test_a_corpus_without_a_document_that_fits_is_refused(corpus):
    with pytest.raises(ValueError, match="fits into data.sequence_length 3; the shortest has"):
        CompleteBlocks(Corpus(corpus, "train"), 3)
