import numpy as np
import pytest

from data_prep.filters import Tally, judge, windows
from data_prep.manifest import Count, Rejects, Settings


@pytest.mark.parametrize(
    ("length", "reason"),
    [(9, "too-short"), (10, None), (2048, None), (2049, "too-long")],
)
def test_both_limits_are_inclusive(length, reason):
    assert judge(length, Settings(max_tokens=2048, min_tokens=10)) == reason


def test_no_length_is_rejected_by_default():
    ids = np.arange(1_000_000, dtype=np.int32)
    for length in (1, 1_000_000):
        assert judge(length, Settings()) is None
    assert [len(piece) for piece in windows(ids, Settings())] == [len(ids)]


def test_tallies_are_added_in_order():
    first, second = Tally(cut_tokens=7), Tally(cut_tokens=2)
    first.keep("train", "Books3", Count(1, 10, 30))
    first.reject("too-long", Rejects({"Books3": 1}, ["a:1"], {"Books3": 20}, {"Books3": 4}))
    second.keep("train", "Books3", Count(2, 5, 15))
    second.keep("valid", "Pile-CC", Count(1, 1, 1))
    for line in range(10):
        subset = "Pile-CC" if line % 2 else "Books3"
        second.reject("too-long", Rejects({subset: 1}, [f"b:{line}"], {subset: 3}, {subset: 2}))
    second.cut = 3
    first.add(second)
    assert first.kept == {
        "train": {"Books3": Count(3, 15, 45)},
        "valid": {"Pile-CC": Count(1, 1, 1)},
    }
    rejects = first.rejects["too-long"]
    assert rejects.by_subset == {"Books3": 6, "Pile-CC": 5}
    assert rejects.text_bytes == {"Books3": 35, "Pile-CC": 15}
    assert rejects.tokens == {"Books3": 14, "Pile-CC": 10}
    assert rejects.count == 11
    assert rejects.places == ["a:1", "b:0", "b:1", "b:2", "b:3"]
    assert (first.cut, first.cut_tokens) == (3, 9)
    assert first.rejects_summary() == "11 too-long (first at a:1)"
    assert second.rejects["too-long"].count == 10


@pytest.mark.parametrize("count", [0, 1, 29, 30, 31, 60, 61, 100])
def test_windows_respect_the_limit_and_lose_nothing(count):
    ids = np.arange(count, dtype=np.int32)
    drop, truncate, split = (Settings(32, long) for long in ("drop", "truncate", "split"))
    assert [piece.tolist() for piece in windows(ids, drop)] == [ids.tolist()]
    assert [piece.tolist() for piece in windows(ids, truncate)] == [ids[:30].tolist()]
    pieces = windows(ids, split)
    assert np.concatenate(pieces).tolist() == ids.tolist()
    assert all(len(piece) == 30 for piece in pieces[:-1])
    assert all(judge(len(piece) + 2, split) is None for piece in pieces)
    assert (judge(count + 2, drop) == "too-long") == (count > 30)
