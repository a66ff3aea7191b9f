"""A split as blocks: each token at most once, and special tokens where they belong."""

import pickle
import shutil
from functools import cached_property

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from data_prep.blocks import best_fit
from data_prep.corpus import Corpus
from data_prep.verify import verify
from pretrain.data.sources import (
    SOURCES,
    BestFitBlocks,
    ChunkedBlocks,
    CompleteBlocks,
    ContiguousBlocks,
    OneDocumentBlocks,
)

# The same examples in each run, without time limits.
bounded = settings(max_examples=50, derandomize=True, deadline=None, database=None)
LENGTH = 64
SHORT = 24
"""Shorter than many documents of the corpus."""
WITHOUT_BLOCKS = shutil.ignore_patterns("blocks")
OF_DOCUMENTS = [name for name, packing in SOURCES.items() if not packing.pairs]


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
        documents = packed.parts(index)[0].tolist()
        assert len(block.ids) == len(block.document_ids) <= LENGTH
        for number, document in enumerate(documents, start=1):
            expected = [0, *packed.corpus.document(document)]
            assert block.ids[block.document_ids == number].tolist() == expected
        seen += documents
    assert sorted(seen) == list(range(len(packed.corpus)))


class Texts:
    """A split whose token n, counted over all documents, has the id n + 10."""

    split = "train"

    def __init__(self, lengths):
        self.lengths = np.array(lengths, dtype=np.int32)
        self.tokens = sum(lengths)
        self._ends = 10 + np.cumsum(self.lengths)

    def __len__(self):
        return len(self.lengths)

    def document(self, index, first=0, end=None):
        stop = self._ends[index]
        return np.arange(stop - self.lengths[index], stop)[first:end]


def cut(kind, texts, block_tokens):
    """Blocks whose tables are not kept on disk."""

    def tables(self):
        return self._cut(texts.lengths)

    return type("Unkept", (kind,), {"_tables": cached_property(tables)})(texts, block_tokens)


@bounded
@given(some.lists(some.integers(1, 40), min_size=1, max_size=40), some.integers(2, 16))
def test_chunked_blocks_hold_each_token_once_in_the_order_of_its_document(lengths, block_tokens):
    texts = Texts(lengths)
    source = cut(ChunkedBlocks, texts, block_tokens)
    place = {}
    for index, block in enumerate(source):
        assert len(block.ids) == source.size(index) <= block_tokens
        parts = zip(*map(np.ndarray.tolist, source.parts(index)), strict=True)
        for number, (document, first) in enumerate(parts, start=1):
            start, *ids = block.ids[block.document_ids == number].tolist()
            assert start == 0
            assert ids == texts.document(document)[first : first + block_tokens - 1].tolist()
            assert not place.keys() & {*ids}
            place |= dict.fromkeys(ids, index)
        assert block.document_ids.tolist() == sorted(block.document_ids.tolist())
    assert len(place) == sum(lengths)
    assert source.share_of_tokens == 1.0
    sizes = sum(source.size(index) for index in range(len(source)))
    assert source.fill == pytest.approx(sizes / (len(source) * block_tokens))
    with pytest.raises(IndexError):
        source[len(source)]


@bounded
@given(some.lists(some.integers(1, 40), min_size=1, max_size=40), some.integers(2, 16))
def test_chunked_blocks_are_best_fit_blocks_of_the_last_chunks_and_full_chunks(
    lengths, block_tokens
):
    room = block_tokens - 1
    source = cut(ChunkedBlocks, Texts(lengths), block_tokens)
    last_chunks, ends = best_fit(
        np.array([(n - 1) % room + 1 for n in lengths]), block_tokens, exact=True
    )
    full = sum((n - 1) // room for n in lengths)
    assert len(source) == len(ends) + full
    packed = [source.parts(index)[0].tolist() for index in range(len(ends))]
    assert packed == [part.tolist() for part in np.split(last_chunks, ends[:-1])]
    assert all(source.size(index) == block_tokens for index in range(len(ends), len(source)))


@bounded
@given(some.lists(some.integers(1, 40), min_size=1, max_size=40), some.integers(2, 16))
def test_contiguous_blocks_are_the_text_of_the_split_cut_every_so_many_tokens(
    lengths, block_tokens
):
    texts = Texts(lengths)
    source = cut(ContiguousBlocks, texts, block_tokens)
    text = np.concatenate([texts.document(number) for number in range(len(texts))])
    cuts = range(block_tokens - 1, len(text), block_tokens - 1)
    blocks = [source[index] for index in range(len(source))]
    for block, tokens in zip(blocks, np.split(text, cuts), strict=True):
        assert block.document_ids is None
        assert block.ids.tolist() == [0, *tokens]
    for index, block in enumerate(blocks):
        assert source.size(index) == len(block.ids)
        parts = zip(*map(np.ndarray.tolist, source.parts(index)), strict=True)
        read = np.concatenate([texts.document(document, first) for document, first in parts])
        assert read[: len(block.ids) - 1].tolist() == block.ids[1:].tolist()
    assert source.share_of_tokens == 1.0
    ids = sum(len(block.ids) for block in blocks)
    assert source.fill == pytest.approx(ids / (len(source) * block_tokens))
    for outside in (-1, len(source)):
        with pytest.raises(IndexError, match=f"block {outside} of {len(source)}"):
            source[outside]


@bounded
@given(some.lists(some.integers(1, 40), min_size=1, max_size=40), some.integers(2, 16))
def test_a_block_of_one_document_is_its_beginning(lengths, block_tokens):
    texts = Texts(lengths)
    source = cut(OneDocumentBlocks, texts, block_tokens)
    blocks = [source[index] for index in range(len(source))]
    for index, block in enumerate(blocks):
        assert block.document_ids is None
        assert block.ids.tolist() == [0, *texts.document(index)[: block_tokens - 1]]
        assert source.parts(index) == ([index], [0])
        assert source.size(index) == len(block.ids)
    ids = sum(len(block.ids) for block in blocks)
    assert len(blocks) == len(lengths)
    assert source.fill == pytest.approx(ids / (len(blocks) * block_tokens))
    assert source.share_of_tokens == (ids - len(blocks)) / sum(lengths)
    with pytest.raises(IndexError):
        source[len(source)]


@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_the_share_is_that_of_the_documents_that_are_not_dropped(name, corpus):
    source = SOURCES[name](Corpus(corpus, "train"), SHORT)
    tokens = sum(int((block.ids != 0).sum()) for block in source)
    assert source.share_of_tokens == tokens / source.corpus.lengths.sum()
    assert (source.share_of_tokens == 1.0) == (name in ("chunked", "contiguous"))


@pytest.mark.parametrize("length", [SHORT, LENGTH])
@pytest.mark.parametrize("name", SOURCES)
def test_sizes_and_subsets_are_those_of_the_ids(name, length, corpus_for):
    source = SOURCES[name](Corpus(corpus_for(name), "valid"), length)
    source.corpus.__dict__["subsets"] = np.arange(len(source.corpus), dtype=np.uint8) % 3
    for index, block in enumerate(source):
        assert source.size(index) == len(source.subsets(index)) == len(block.ids)
        # A document ends with </s>, and the next one, with its <s> if it has one, follows.
        number = np.cumsum(np.concatenate([[0], block.ids[:-1] == 2]))
        assert np.array_equal(source.subsets(index), source.parts(index)[0][number] % 3)


@pytest.mark.parametrize("length", [SHORT, LENGTH])
@pytest.mark.parametrize("name", SOURCES)
def test_how_a_split_is_cut_is_kept_and_read_again(name, length, corpus_for, tmp_path, monkeypatch):
    folder = shutil.copytree(corpus_for(name), tmp_path / "corpus", ignore=WITHOUT_BLOCKS)
    first = SOURCES[name](Corpus(folder, "train"), length)
    assert len(first[0].ids) > 1
    assert len(list(folder.glob("blocks/*"))) == 1 + (name != "one-document")
    monkeypatch.setattr(SOURCES[name], "_cut", pytest.fail)  # nothing is computed again
    monkeypatch.setattr(Corpus, "count_lengths", pytest.fail)
    again = SOURCES[name](Corpus(folder, "train"), length)
    assert len(again) == len(first)
    assert (again.share_of_tokens, again.fill) == (first.share_of_tokens, first.fill)
    assert all(np.array_equal(again[n].ids, first[n].ids) for n in range(len(first)))


@pytest.mark.parametrize("name", SOURCES)
def test_blocks_of_a_corpus_that_cannot_be_written_are_kept_in_the_cache_folder(
    name, corpus_for, tmp_path, monkeypatch
):
    folder = shutil.copytree(corpus_for(name), tmp_path / "corpus", ignore=WITHOUT_BLOCKS)
    (folder / "blocks").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = SOURCES[name](Corpus(folder, "train"), LENGTH)
    assert len(first[0].ids) > 1
    assert all(isinstance(table, np.memmap) for table in first._tables.values())
    assert list(tmp_path.glob("cache/zeroclap/*/*"))
    monkeypatch.setattr(SOURCES[name], "_cut", pytest.fail)  # another process computes nothing
    again = pickle.loads(pickle.dumps(first))
    assert again[0].ids.tolist() == first[0].ids.tolist()


def test_blocks_that_can_be_kept_nowhere_are_refused(corpus, tmp_path, monkeypatch):
    folder = shutil.copytree(corpus, tmp_path / "corpus", ignore=WITHOUT_BLOCKS)
    for path in (folder / "blocks", tmp_path / "cache"):
        path.write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="cannot be cached: .*XDG_CACHE_HOME"):
        ChunkedBlocks(Corpus(folder, "train"), LENGTH)


def test_another_algorithm_reads_no_table_of_this_one(corpus, tmp_path, monkeypatch):
    folder = shutil.copytree(corpus, tmp_path / "corpus", ignore=WITHOUT_BLOCKS)
    length = len(ChunkedBlocks(Corpus(folder, "train"), LENGTH))
    cut = ChunkedBlocks._cut
    monkeypatch.setattr(
        ChunkedBlocks, "_cut", lambda *a: {**cut(*a), "ranges": cut(*a)["ranges"][:-1]}
    )
    assert len(ChunkedBlocks(Corpus(folder, "train"), LENGTH)) == length
    monkeypatch.setattr(ChunkedBlocks, "algorithm", 2)
    assert len(ChunkedBlocks(Corpus(folder, "train"), LENGTH)) == length - 1


@pytest.mark.parametrize("damage", ["cut", "gone", "of floats", "hashes"])
def test_a_damaged_table_is_named(damage, corpus, tmp_path):
    folder = shutil.copytree(corpus, tmp_path / "corpus", ignore=WITHOUT_BLOCKS)
    len(ChunkedBlocks(Corpus(folder, "train"), LENGTH))
    (file,) = folder.glob("blocks/*/ranges.npy")
    content, floats = file.read_bytes(), np.load(file).astype(float)
    file.unlink()
    if damage == "hashes":
        file.write_bytes(content)
        file = file.with_name("SHA256SUMS")
        file.write_bytes(b"\xff")
    elif damage == "cut":
        file.write_bytes(content[:-4])
    elif damage == "of floats":
        np.save(file, floats)
    with pytest.raises(ValueError, match=rf"{file}: is damaged .*; delete {file.parent}"):
        len(ChunkedBlocks(Corpus(folder, "train"), LENGTH))
    assert any(problem.startswith(f"{file}: ") for problem in verify(folder))


def test_a_corpus_without_a_document_that_fits_is_refused(corpus):
    with pytest.raises(ValueError, match="sequence_length 3; the shortest has .*packing chunked"):
        CompleteBlocks(Corpus(corpus, "train"), 3)
    assert ChunkedBlocks(Corpus(corpus, "train"), 3).share_of_tokens == 1.0
