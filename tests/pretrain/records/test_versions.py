"""Which code runs, and whether all ranks and all attempts ran the same."""

import sys

import pytest

from pretrain.records import versions
from pretrain.records.collective import Failure
from tests.pretrain.histories import History


def test_the_version_of_zeroclap_changes_with_any_line_of_its_source(tmp_path, monkeypatch):
    found = versions.versions()
    assert found["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert "pretrain/records/versions.py" in versions.sources()
    (tmp_path / "pretrain").mkdir()
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    seen = {found["zeroclap"]}
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "pretrain" / "a.py").write_text(text)
        versions.sources.cache_clear()
        seen.add(versions.versions()["zeroclap"])
    monkeypatch.undo()
    versions.sources.cache_clear()
    assert len(seen) == 3
    assert versions.versions() == found


def test_differences_are_described_by_host():
    pairs = [(f"n{number}", {"torch": "2.13", "numpy": "2"}) for number in range(10)]
    assert versions.differences(pairs) == []
    pairs[4] = ("n4", {"torch": "2.12"})
    assert versions.differences(pairs) == [
        "torch: 2.13 on n0, n1, n2, n3, n5, n6, n7, n8 and 1 more and 2.12 on n4",
        "numpy: 2 on n0, n1, n2, n3, n5, n6, n7, n8 and 1 more and no on n4",
    ]


def test_ranks_with_other_code_are_refused_on_every_rank():
    def gather(pair):
        """As rank 0, with rank 1 on a host where one file is another."""
        host, own = pair
        other = {name: value for name, value in own.items() if name != "pretrain/loop/loop.py"}
        other |= {"zeroclap": "else"} if "zeroclap" in own else {}
        return [("node1", own), ("node2", other)]

    own = versions.versions()
    assert versions.check_same(lambda value: [value, value], {"a": 1}) == own
    message = (
        rf"zeroclap: {own['zeroclap']} on node1 and else on node2 \(pretrain/loop/loop.py differs"
    )
    with pytest.raises(Failure, match=message):
        versions.check_same(gather, {})


def test_code_that_changed_between_attempts_is_told():
    history = History()
    for torch in ("2.13", "2.13", "2.14"):
        history.versions["torch"] = torch
        history.begin(steps=1)
    found = history.audit()
    assert found.noted == ["code changed between attempts 2 and 3: torch 2.13 to 2.14"]
    assert found.problems == []
