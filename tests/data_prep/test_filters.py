import sys

import numpy as np
import pytest

from data_prep.filters import judge, windows
from data_prep.manifest import Rejects, Settings, Tally, load_manifest
from finetune.zeroclap import main
from tests.data_prep.conftest import make_texts, write_pile

MINE = """
def long_enough(text, subset):
    return "few-words" if len(text.split()) < 20 else None

def only_books(text, subset):
    return None if subset == "Books3" else "no-book"

def divides(text, subset):
    return str(1 // 0)

def answers_false(text, subset):
    return False
"""


@pytest.mark.parametrize(
    ("length", "reason"), [(9, "too-short"), (10, None), (2048, None), (2049, "too-long")]
)
def test_both_limits_are_inclusive_and_by_default_there_is_none(length, reason):
    assert judge(length, Settings(max_tokens=2048, min_tokens=10)) == reason
    assert judge(1, Settings()) is judge(1_000_000, Settings()) is None


def test_rejects_are_added_in_order_with_their_first_places():
    tally, more = Tally({}, {}, 0, 0), Tally({}, {}, 0, 0)
    tally.reject("too-long", Rejects({"Books3": 1}, ["a:1"], {"Books3": 20}, {"Books3": 4}))
    for line in range(10):
        subset = "Pile-CC" if line % 2 else "Books3"
        more.reject("too-long", Rejects({subset: 1}, [f"b:{line}"], {subset: 3}, {subset: 2}))
    tally.add(more)
    places = ["a:1", "b:0", "b:1", "b:2", "b:3"]
    documents, text_bytes = {"Books3": 6, "Pile-CC": 5}, {"Books3": 35, "Pile-CC": 15}
    expected = Rejects(documents, places, text_bytes, {"Books3": 14, "Pile-CC": 10})
    assert tally.rejects == {"too-long": expected}
    assert tally.rejects_summary() == "11 too-long (first at a:1)"


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


# --- filters of the user's own -------------------------------------------------------------------


@pytest.fixture
def words(tmp_path, tokenizer_folder, monkeypatch):
    """A command line of two inputs without filters; `my_filters` can be imported, `here` cannot."""
    files = [
        write_pile(tmp_path / f"{number}.jsonl.zst", make_texts(60, 40, seed=number), subset)
        for number, subset in enumerate(("Books3", "Pile-CC"))
    ]
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "my_filters.py").write_text(MINE)
    (tmp_path / "here.py").write_text("def keep(text, subset): return None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.delitem(sys.modules, "my_filters", raising=False)
    folders = ["--tokenizer", str(tokenizer_folder), "--output", str(tmp_path / "corpus")]
    return ["prepare", "--input", *map(str, files), "--valid-fraction", "0.1", *folders]


@pytest.mark.usefixtures("in_workers")
def test_documents_are_dropped_and_counted_by_reason_in_workers(words, tmp_path, capsys):
    names = ["my_filters:long_enough", "my_filters:only_books"]
    assert main([*words, "--filter", *names]) == 0
    found = load_manifest(tmp_path / "corpus")
    assert found.settings.filters == names
    long = [[len(t.split()) > 19 for t in make_texts(60, 40, seed=n)].count(True) for n in (0, 1)]
    assert {name: each.count for name, each in found.rejects.items()} == {
        "filtered: my_filters:long_enough: few-words": 120 - sum(long),
        "filtered: my_filters:only_books: no-book": long[1],
    }
    assert found.totals["train"].documents + found.totals["valid"].documents == long[0]
    assert "broken" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_filters:divides", "filter my_filters:divides: {h}/0.jsonl.zst:1: ZeroDivisionError: "),
        ("my_filters:answers_false", "{h}/0.jsonl.zst:1: returned False; accepted: None to keep"),
        ("my_filters:none", "--filter my_filters:none: module 'my_filters' has no attribute"),
        ("my_filters", "--filter my_filters: "),
        ("gone:none", "--filter gone:none: No module named 'gone'; accepted: package.module:fun"),
        ("here:keep", "No module named 'here'"),  # not imported from the working directory
    ],
)
def test_a_filter_that_fails_is_named_and_leaves_no_shard(name, message, words, tmp_path, capsys):
    assert main([*words, "--filter", name]) == 2
    assert message.format(h=tmp_path) in capsys.readouterr().err
    assert not [*(tmp_path / "corpus").rglob("shard-*")]
