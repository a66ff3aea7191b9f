"""The ledger: a chain that tells what happened, and the state that follows from it."""

import json

import pytest

from pretrain import ledger
from pretrain.order import Lineage, Segment


@pytest.fixture
def path(tmp_path):
    return tmp_path / ledger.FILE_NAME


def filled(path, count=5):
    for number in range(count):
        ledger.append(path, "commit", step=number * 10, note="é\u2028 ok")
    return ledger.read(path)


def test_what_is_appended_is_read_back_in_order(path):
    assert ledger.read(path) == []
    records = filled(path)
    assert [record["step"] for record in records] == [0, 10, 20, 30, 40]
    assert [record["number"] for record in records] == [0, 1, 2, 3, 4]
    assert len({record["previous"] for record in records}) == 5
    assert ledger.append(path, "done") == ledger.read(path)[-1]


def test_numbers_that_are_not_finite_survive(path):
    ledger.append(path, "spike", loss=float("nan"), baseline=float("inf"))
    (record,) = ledger.read(path)
    assert record["loss"] != record["loss"]
    assert record["baseline"] == float("inf")


def test_a_torn_last_line_is_left_out_wherever_it_was_torn_and_cut_off_by_the_next(path):
    records = filled(path)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for length in range(1, len(last)):
        path.write_bytes(whole[: len(whole) - len(last) + length])
        assert ledger.read(path) == records[:4]
    appended = ledger.append(path, "crash", reason="torn")
    assert ledger.read(path) == [*records[:4], appended]
    assert path.read_bytes().endswith(b"\n")


def test_any_change_of_an_earlier_line_is_refused_with_its_place(path):
    filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = lines[2].replace(b'"step": 20', b'"step": 21')
    assert changed != lines[2]
    for damaged in (
        [*lines[:2], changed, *lines[3:]],
        [*lines[:2], *lines[3:]],
        [lines[0], lines[2], lines[1], *lines[3:]],
        [*lines[:3], lines[2], *lines[3:]],
        [*lines[:2], b"{}\n", *lines[3:]],
        [*lines[:2], b"not json\n", *lines[3:]],
        [*lines[:2], b"[1]\n", *lines[3:]],
        [*lines[:2], b"\xff\xfe\n", *lines[3:]],
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(ValueError, match=r"line [234] does not follow from the line before"):
            ledger.read(path)
        with pytest.raises(ValueError, match="does not follow"):
            ledger.append(path, "done")


def test_a_line_of_another_run_is_refused(path, tmp_path):
    filled(path)
    other = tmp_path / "other.jsonl"
    for number in range(6):
        ledger.append(other, "commit", step=number)
    path.write_bytes(path.read_bytes() + other.read_bytes().splitlines(keepends=True)[5])
    with pytest.raises(ValueError, match="line 6"):
        ledger.read(path)


def state(*events, seed=1):
    """The fold of (kind, fields) events."""
    records = [
        {"number": number, "kind": kind, **fields} for number, (kind, fields) in enumerate(events)
    ]
    return ledger.fold(records, seed)


def commits(*steps):
    return [("commit", {"step": step}) for step in steps]


def rollback(step, seed):
    return ("rollback", {"step": step, "seed": seed})


def test_an_empty_ledger_is_a_run_that_has_not_begun():
    empty = state(seed=7)
    assert empty.segments == ((0, 7),)
    assert (empty.attempts, empty.checkpoints, empty.resume_step()) == (0, (), 0)
    assert empty.seeds == {7}
    assert empty.last is None
    assert not empty.done


def test_checkpoints_are_what_is_committed_and_neither_deleted_nor_rejected():
    events = [*commits(10, 20, 30, 40), ("delete", {"step": 10}), ("reject", {"step": 40})]
    assert state(*events).checkpoints == (20, 30)
    assert state(*events).resume_step() == 30
    assert state(*events, *commits(40)).checkpoints == (20, 30, 40)


def test_a_step_committed_again_replaces_what_lies_beyond_it():
    """A resume from 20, after a crash at 40, commits 30 again: 40 is of the abandoned attempt."""
    assert state(*commits(20, 30, 40), *commits(30)).checkpoints == (20, 30)


def test_a_rollback_drops_what_lies_beyond_its_step():
    rolled = state(*commits(10, 20, 30), rollback(20, 2))
    assert rolled.checkpoints == (10, 20)
    assert rolled.segments == ((0, 1), (20, 2))
    assert rolled.seeds == {1, 2}
    assert rolled.resume_step() == 20


def test_a_rollback_past_an_earlier_reseed_forgets_its_segment_but_not_its_seed():
    rolled = state(*commits(10, 20, 30), rollback(20, 2), *commits(30), rollback(10, 3))
    assert rolled.checkpoints == (10,)
    assert rolled.segments == ((0, 1), (10, 3))
    assert rolled.seeds == {1, 2, 3}
    assert [record["step"] for record in rolled.rollbacks] == [20, 10]


def test_a_rollback_to_the_initial_weights_leaves_one_segment():
    rolled = state(*commits(10), rollback(0, 2))
    assert rolled.segments == ((0, 2),)
    assert rolled.checkpoints == ()


def test_two_rollbacks_to_one_step_leave_the_newer_seed():
    assert state(*commits(10), rollback(10, 2), rollback(10, 3)).segments == ((0, 1), (10, 3))


def test_attempts_are_counted_spikes_kept_and_done_is_done():
    events = [("created", {}), ("attempt", {}), ("spike", {"onset": 5}), ("attempt", {})]
    told = state(*events, ("done", {"step": 9}))
    assert told.attempts == 2
    assert [spike["onset"] for spike in told.spikes] == [5]
    assert told.done
    assert told.last == {"number": 4, "kind": "done", "step": 9}


def test_the_lineage_counts_places_in_blocks():
    expected = Lineage((Segment(0, 1), Segment(640, 2)))
    assert ledger.lineage([(0, 1), (20, 2)], 32) == expected


def test_a_ledger_is_json_lines(path):
    filled(path)
    assert [json.loads(line)["kind"] for line in path.read_text().split("\n")[:-1]] == [
        "commit"
    ] * 5
