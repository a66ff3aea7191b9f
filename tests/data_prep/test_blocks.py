import json
import time

import numpy as np
import pytest

from data_prep.blocks import best_fit, complete


def slow_complete(lengths, block_tokens):
    """Follow the definition, one document at a time."""
    blocks = []
    first, size = 0, 1
    for index, length in enumerate(lengths):
        if size + length > block_tokens:
            if index > first:
                blocks.append((first, index))
            first, size = index, 1
        if 1 + length > block_tokens:
            first = index + 1
        else:
            size += length
    if first < len(lengths):
        blocks.append((first, len(lengths)))
    return blocks


@pytest.mark.parametrize("seed", range(10))
def test_complete_follows_its_definition(seed, monkeypatch):
    monkeypatch.setattr("data_prep.blocks._WINDOW", 1 + seed)
    generator = np.random.default_rng(seed)
    longest = int(generator.integers(1, 40))
    lengths = generator.integers(1, longest + 1, size=200).astype(np.int32)
    found = complete(lengths, block_tokens=20)
    assert [tuple(block) for block in found.tolist()] == slow_complete(lengths.tolist(), 20)
    assert found.dtype == np.int64


def test_reproduces_fairseq(golden):
    theirs = json.loads((golden / "data_and_lr.json").read_text())["token_blocks"]
    # Fairseq truncates to 64, so a longer document is a block of 64, 65 with its <s>,
    # which the size filter drops.
    expected = [
        [first, last + 1]
        for first, _, last, size in theirs["blocks_start_doc_offset_enddoc_size"]
        if size <= theirs["block_size"]
    ]
    found = complete(np.array(theirs["doc_sizes"]), theirs["block_size"] + 1)
    assert found.tolist() == expected


def blocks_of(documents, ends):
    return [part.tolist() for part in np.split(documents, ends[:-1])]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_best_fit_packs_every_fitting_document_once_without_overflow(seed, exact):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, int(generator.integers(3, 40)), size=300).astype(np.int32)
    documents, ends = best_fit(lengths, 20, exact=exact)
    assert sorted(documents.tolist()) == np.flatnonzero(lengths + 1 <= 20).tolist()
    assert ends[-1] == len(documents)
    assert (np.diff(ends, prepend=0) > 0).all()
    for block in blocks_of(documents, ends):
        assert sum(int(lengths[document]) + 1 for document in block) <= 20


def test_best_fit_fills_blocks_of_many_documents_to_99_percent():
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(6.0, 1.2, 200_000), 3, 100_000).astype(np.int32)
    for block_tokens in (512, 2048):
        _, ends = best_fit(lengths, block_tokens)
        tokens = (lengths[lengths < block_tokens] + 1).sum()
        assert tokens / (len(ends) * block_tokens) > 0.99


def slow_best_fit(lengths, block_tokens):
    """Follow the definition, one document at a time; returns the size of each block."""
    sizes: list[int] = []
    for length in sorted((n for n in lengths if n < block_tokens), reverse=True):
        fitting = [n for n, size in enumerate(sizes) if size + length + 1 <= block_tokens]
        if not fitting:
            sizes.append(0)
            fitting = [len(sizes) - 1]
        sizes[max(fitting, key=lambda n: sizes[n])] += length + 1
    return sizes


@pytest.mark.parametrize("seed", range(30))
def test_exact_best_fit_follows_its_definition(seed):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, int(generator.integers(2, 40)), size=300).astype(np.int32)
    documents, ends = best_fit(lengths, 40, exact=True)
    sizes = [sum(int(lengths[d]) + 1 for d in block) for block in blocks_of(documents, ends)]
    assert sorted(sizes) == sorted(slow_best_fit(lengths.tolist(), 40))


def test_packing_into_long_blocks_takes_no_time_for_sizes_that_no_document_has():
    lengths, begun = np.arange(1, 2001), time.process_time()
    documents, _ = best_fit(lengths, 1_000_000, exact=True)
    assert len(documents) == len(lengths)
    assert time.process_time() - begun < 5  # 0.1 s; minutes, if each size looked at all spaces


def test_no_documents_or_only_too_long_ones_give_no_blocks():
    for lengths in (np.array([], dtype=np.int32), np.array([8, 9, 100])):
        assert complete(lengths, 8).shape == (0, 2)
        assert [*map(len, best_fit(lengths, 8))] == [0, 0]
    assert complete(np.array([7]), 8).tolist() == [[0, 1]]
    assert [each.tolist() for each in best_fit(np.array([7]), 8)] == [[0], [1]]
