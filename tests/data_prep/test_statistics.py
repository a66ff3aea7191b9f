import math

import numpy as np
import pytest

from data_prep.statistics import (
    UPPER_EDGES,
    count_ids,
    count_lengths,
    length_histogram,
    unigram_perplexity,
    write_counts,
)


def test_every_length_is_between_the_edges_of_its_bucket():
    lengths = np.arange(2, 5000)
    counts = count_lengths(lengths)
    lower = np.concatenate([[0], UPPER_EDGES[:-1]])
    for low, high, count in zip(lower, UPPER_EDGES, counts, strict=True):
        assert count == ((lengths > low) & (lengths <= high)).sum()


def test_shares_of_long_documents_are_exact_at_their_limits():
    histogram = length_histogram(count_lengths([3, 1024, 1025, 2048, 2049, 2_000_000]))
    assert histogram.share_over_1024 == 4 / 6
    assert histogram.share_over_2048 == 2 / 6
    assert sum(histogram.counts) == 6
    assert histogram.counts[-1] == 1


def test_counts_of_several_files_are_added(tmp_path):
    write_counts(tmp_path / "a", np.array([1, 2, 0, 0, 2, 0]))
    write_counts(tmp_path / "b", np.array([0, 1 << 40, 0, 0, 0, 0]))
    write_counts(tmp_path / "c", np.zeros(6, dtype=np.int64))
    found = count_ids([tmp_path / name for name in "abc"], 6)
    assert found.tolist() == [1, 2 + (1 << 40), 0, 0, 2, 0]


@pytest.mark.parametrize("content", [bytes(24), b"\6" + bytes(15)])
def test_damaged_counts_are_refused_by_their_name(tmp_path, content):
    (tmp_path / "a.counts").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.counts: is damaged: "):
        count_ids([tmp_path / "a"], 6)


def test_perplexity_is_that_of_the_smoothed_unigram_distribution():
    # Smoothed: 4/6, 1/6, 1/6.
    found = unigram_perplexity(np.array([3, 0, 0]), np.array([1, 2, 0]))
    assert found == pytest.approx(math.exp(-(math.log(4 / 6) + 2 * math.log(1 / 6)) / 3))
    flat = np.full(50, 7)
    assert unigram_perplexity(flat, flat) == pytest.approx(50)
    assert unigram_perplexity(flat, np.zeros(50, dtype=np.int64)) is None
