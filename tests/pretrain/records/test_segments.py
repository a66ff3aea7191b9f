"""What the segments of a ledger lead to, and what they look like to a reader."""

import pytest

from pretrain.data.lineage import Lineage
from pretrain.records import ledger
from pretrain.records.segments import Source, _copy_lines, fork_records, order_of
from tests.pretrain.histories import History, recipe


def test_the_order_counts_places_in_blocks_and_skips_what_was_declared():
    history = History(total=1000, sizes=[(0, 32)])
    history.roll_back(10, skip=(12, 14))
    history.roll_back(11)
    found, _ = order_of(history.records)
    expected = Lineage.begin(1000, 5).rolled_back(320, 6, (384, 448)).rolled_back(352, 7)
    assert expected.skipped_count == 64
    assert found.identity() == [list(each) for each in expected.identities]
    assert found.identity(352) == found.identity()[:2]


def test_another_recipe_from_a_step_on_ends_the_rollbacks_to_later_steps():
    """Their seeds, skips and learning rates answered spikes of steps that are done again."""
    totals = {"one": 100, "other": 60}

    def order_after(*later):
        history = History(totals=totals, weights=[(0, (3, 1))])
        history.roll_back(10)
        for step in later:
            history.roll_back(step, skip=(step, step + 3))
        config = recipe([(12, 7)], [*totals], [(12, (1, 1))])
        history.segment("user", 12, config)
        return order_of(history.records), history.state.segments[1:]

    (order, sizes), segments = order_after(14, 20)
    (expected, _), _ = order_after()
    assert order.identity() == expected.identity()
    assert order.seeds == expected.seeds == ((0, 5), (sizes.first_block(10), 6))
    assert [(r["step"], r["why"]) for r in segments] == [(10, "spike"), (12, "user")]


def test_a_source_is_a_step_or_a_run_and_a_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Source.parse("400") == Source(400)
    assert Source.parse("runs/a@b@400") == Source(400, tmp_path / "runs" / "a@b")
    for text in ("", "runs/a", "runs/a@", "-1", "4.5", "runs/a@x"):
        with pytest.raises(ValueError, match=r"write a step, or a run's folder and step"):
            Source.parse(text)


def test_lines_are_copied_byte_by_byte_and_damaged_ones_are_left_out(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for data, copied in (
        (b'{"a": 1.0}\n{"b"', b'{"a": 1.0}\n'),
        (b'{"a": 1.0}', b'{"a": 1.0}\n'),
        (b'{}\n[1]\n3\n{"a": 1.0}\n', b'{"a": 1.0}\n'),
    ):
        source.write_bytes(data)
        _copy_lines(source, target, lambda record: record["a"])
        assert target.read_bytes() == copied


def test_a_fork_takes_the_records_up_to_the_newest_commit_of_its_step(tmp_path):
    for kind, step in (("segment", 0), ("commit", 5), ("reject", 5), ("commit", 5), ("commit", 6)):
        ledger.append(tmp_path / ledger.FILE_NAME, kind, why="start", step=step, seed=1)
    assert len(fork_records(tmp_path, 5)) == 4
