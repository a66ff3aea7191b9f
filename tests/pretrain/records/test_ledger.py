"""The ledger: a hash chain of records, and the state that follows from them."""

import dataclasses
import errno
import functools
import math
import os
import random
import subprocess
from pathlib import Path

import pytest

from pretrain.config.sections import SpikeConfig
from pretrain.records import ledger
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.observations import Evaluation, Observation, Seen
from tests.pretrain.builders import failing


@pytest.fixture
def path(tmp_path):
    return tmp_path / ledger.FILE_NAME


def filled(path, count=5):
    for number in range(count):
        ledger.append(path, "commit", step=number * 10, note="é\u2028 ok")
    return ledger.read_ledger(path)


def test_what_is_appended_is_read_back_in_order(path, monkeypatch):
    assert ledger.read_ledger(path) == []
    monkeypatch.setattr(ledger.files, "fsync", (synced := []).append)
    records = filled(path)
    assert synced == [path.parent], "the name of a new file is on disk"
    assert [record["step"] for record in records] == [0, 10, 20, 30, 40]
    assert [record["number"] for record in records] == [0, 1, 2, 3, 4]
    assert len({record["previous"] for record in records}) == 5
    appended = ledger.append(path, "spike", loss=math.nan, deep=[math.inf, (1.5, -math.inf)])
    assert appended == ledger.read_ledger(path)[-1]
    assert (appended["loss"], appended["deep"]) == (None, [None, [1.5, None]])


@pytest.mark.parametrize("left", [0, 1, 60, 1000])
def test_a_record_that_does_not_fit_is_refused_with_the_file_s_name_and_leaves_nothing(
    path, monkeypatch, room, left
):
    def fsync(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    records, before = filled(path), path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        room(len(before) + left)
        with pytest.raises(OSError, match=r"(File too large|Input/output error).*ledger.jsonl"):
            ledger.append(path, "done", step=50)
    assert path.read_bytes() == before
    assert ledger.read_ledger(path) == records
    room(1 << 20)
    assert ledger.append(path, "done")["number"] == len(records)


def test_a_read_that_fails_for_a_moment_is_tried_again(path, monkeypatch, no_waiting):
    records, left = filled(path), [errno.ESTALE, errno.EIO]
    monkeypatch.setattr(Path, "read_bytes", failing(Path.read_bytes, left))
    assert ledger.read_ledger(path) == records
    assert not left


def test_a_torn_last_line_is_left_out_wherever_it_was_torn_and_cut_off_by_the_next(path):
    records = filled(path)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for length in range(1, len(last) - 1):
        path.write_bytes(whole[: len(whole) - len(last) + length])
        assert ledger.read_ledger(path) == records[:4]
    appended = ledger.append(path, "crash", reason="torn")
    assert ledger.read_ledger(path) == [*records[:4], appended]
    assert path.read_bytes().endswith(b"\n")


def test_a_whole_last_record_without_its_line_feed_is_kept(path):
    records = filled(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert ledger.read_ledger(path) == records
    appended = ledger.append(path, "done", step=50)
    assert ledger.read_ledger(path) == [*records, appended]
    assert path.read_bytes().count(b"\n") == 6


@pytest.mark.parametrize("text", [b"my notes", b'{"a": 1}', b"\0notes"])
def test_a_file_that_is_no_ledger_is_refused_and_stays_as_it_is(path, text):
    path.write_bytes(text)
    for action in (lambda: ledger.read_ledger(path), lambda: ledger.append(path, "done")):
        with pytest.raises(ValueError, match="line 1 does not follow"):
            action()
    assert path.read_bytes() == text


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.replace(b"\n", b"\n\n", 2),
    ],
)
def test_what_an_editor_left_is_refused_with_a_command_that_undoes_it(path, edit):
    filled(path)
    path.write_bytes(edit(whole := path.read_bytes()))
    with pytest.raises(ValueError, match="line . does not follow") as refused:
        ledger.read_ledger(path)
    subprocess.run(["/bin/sh", "-c", str(refused.value).split("`")[1]], check=True)
    assert path.read_bytes() == whole


def test_a_tail_that_a_power_failure_filled_with_zeros_is_cut_off(path):
    records = filled(path)
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert ledger.append(path, "done") == ledger.read_ledger(path)[-1]
    assert ledger.read_ledger(path)[:-1] == records


def test_a_ledger_that_is_a_symbolic_link_is_refused(path, tmp_path):
    other = tmp_path / "notes"
    other.write_text("not ours")
    path.symlink_to(other)
    with pytest.raises(ValueError, match=f"{path}: is a symbolic link"):
        ledger.append(path, "done")
    assert other.read_text() == "not ours"


def test_any_change_of_a_line_is_refused_with_its_place(path):
    filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for place, damaged in (
        (3, [*lines[:2], lines[2].replace(b'"step": 20', b'"step": 21'), *lines[3:]]),
        (5, [*lines[:4], lines[4].replace(b'"step": 40', b'"step": "4"')]),  # no line follows it
        (3, [*lines[:2], *lines[3:]]),
        (2, [lines[0], lines[2], lines[1], *lines[3:]]),
        (4, [*lines[:3], lines[2], *lines[3:]]),
        *((3, [*lines[:2], text, *lines[3:]]) for text in (b"{}\n", b"[1]\n", b"\xff\xfe\n")),
    ):
        path.write_bytes(b"".join(damaged))
        for action in (lambda: ledger.read_ledger(path), lambda: ledger.append(path, "done")):
            with pytest.raises(ValueError, match=f"line {place} does not follow from the line"):
                action()


START = ("segment", {"why": "start", "step": 0, "seed": 1})


def state(*events):
    """The state of a run that has begun, after (kind, fields) events."""
    records = [
        {"number": number, "kind": kind, **fields}
        for number, (kind, fields) in enumerate([START, *events])
    ]
    return ledger.run_state(records)


def commits(*steps):
    return [("commit", {"step": step}) for step in steps]


def rollback(step, seed, **fields):
    plain = {"skip": None, "learning_rate_factor": 1.0, "learning_rate_steps": 0}
    return ("segment", {"why": "spike", "step": step, "seed": seed, **plain, **fields})


def attempt(step=0):
    return ("attempt", {"step": step})


def suspicion(kind, onset, channel="fast"):
    return (kind, {"onset": onset, "channel": channel, "step": onset + 5})


def test_an_empty_ledger_is_a_run_that_has_not_begun():
    empty = ledger.run_state([])
    assert (empty.attempts, empty.checkpoints, empty.resume_step()) == (0, (), 0)
    assert (empty.segments, empty.seeds) == ((), frozenset())
    assert not empty.is_done(1)


def test_checkpoints_are_what_is_committed_and_neither_deleted_nor_rejected():
    events = [*commits(10, 20, 30, 40), ("delete", {"step": 10}), ("reject", {"step": 40})]
    assert state(*events).checkpoints == (20, 30)
    assert state(*events).resume_step() == 30
    assert state(*events, *commits(40)).checkpoints == (20, 30, 40)


def test_a_step_committed_again_replaces_what_lies_beyond_it():
    """A resume from 20, after a crash at 40, commits 30 again: 40 is of the abandoned attempt."""
    assert state(*commits(20, 30, 40), *commits(30)).checkpoints == (20, 30)


def test_a_rollback_past_an_earlier_reseed_forgets_its_segment_but_not_its_seed():
    rolled = state(*commits(10, 20, 30), rollback(20, 2), *commits(30), rollback(10, 3))
    assert rolled.checkpoints == (10,)
    assert rolled.seeds_by_step == [(0, 1), (10, 3)]
    assert rolled.seeds == {1, 2, 3}
    assert [record["step"] for record in rolled.rollbacks] == [20, 10]


def test_attempts_are_counted_spikes_kept_and_done_is_done():
    events = [attempt(), suspicion("spike", 5), attempt()]
    end = state(*events, ("done", {"step": 9}))
    assert end.attempts == 2
    assert [spike["onset"] for spike in end.spikes] == [5]
    assert end.is_done(9)
    assert not end.is_done(10), "it was extended"


def test_a_reject_of_the_last_checkpoint_undoes_done_until_it_is_done_again():
    end = [*commits(10, 20), ("done", {"step": 20})]
    assert state(*end, ("reject", {"step": 10})).is_done(20)
    undone = [*end, ("reject", {"step": 20})]
    assert not state(*undone).is_done(20)
    assert state(*undone).resume_step() == 10
    assert state(*undone, attempt(10), *commits(20), ("done", {"step": 20})).is_done(20)


def test_a_rollback_of_an_extended_run_to_before_its_first_end_undoes_that_end():
    extended = [*commits(10, 20), ("done", {"step": 20}), attempt(20)]
    assert state(*extended).is_done(20)
    assert state(*extended, rollback(20, 2)).is_done(20)
    assert state(*extended, rollback(10, 2)).finished_steps == 0


def test_a_spike_is_unanswered_until_a_rollback_follows_it():
    assert state(attempt(), suspicion("suspect", 5)).unanswered_spike is None
    spiked = [attempt(), suspicion("spike", 5)]
    assert state(*spiked).unanswered_spike["onset"] == 5
    assert state(*spiked, ("crash", {})).unanswered_spike["onset"] == 5
    again = [*spiked, rollback(0, 2), attempt(), suspicion("spike", 7)]
    assert state(*again).unanswered_spike["onset"] == 7


def test_checkpoints_saved_after_an_onset_are_tainted_while_it_is_suspected():
    events = [attempt(), *commits(10, 20, 30), suspicion("suspect", 20)]
    assert state(*events).tainted == (30,)
    assert state(*events, *commits(40)).tainted == (30, 40)
    assert state(*events, suspicion("healed", 20)).tainted == ()
    assert state(*events, suspicion("new-level", 20)).tainted == ()
    assert state(*events, suspicion("spike", 20)).tainted == (30,)
    assert state(*events, suspicion("spike", 20), rollback(10, 2)).tainted == ()


def test_suspicions_of_several_channels_heal_one_by_one():
    events = [
        attempt(),
        *commits(10, 20),
        suspicion("suspect", 15, "gradient-norm"),
        suspicion("suspect", 8),
    ]
    assert state(*events).suspected_since == 8
    assert state(*events, suspicion("suspect", 12)).suspected_since == 8, "the first one counts"
    assert state(*events, suspicion("healed", 8)).suspected_since == 15
    assert state(*events, suspicion("healed", 15, "gradient-norm")).suspected_since == 8


@pytest.mark.parametrize("seed", range(25))
def test_open_suspicions_are_those_of_the_detector_that_an_attempt_begins_with(seed):
    """Crashes, resumes, rejected checkpoints and rollbacks, at random."""
    draw = random.Random(seed)
    events, attempts = [], 0
    surviving: list[list[Seen]] = []  # of each step, with the evaluation after it
    opened = 0
    while len(surviving) < 400 and attempts < 40:
        attempts += 1
        saved = state(*events).checkpoints
        if saved and draw.random() < 0.2:
            events.append(("reject", {"step": saved[-1]}))
        first = state(*events).resume_step()
        surviving = surviving[:first]
        events.append(attempt(first))
        refed = SpikeDetector(DETECTOR)
        open_now: dict[str, int] = {}
        for event in [e for step in surviving for seen in step for e in refed.update(seen)]:
            assert event.kind != "spike"
            open_now.pop(event.channel, None)
            open_now |= {event.channel: event.onset} if event.kind == "suspect" else {}
        assert sorted(state(*events).suspected) == sorted(open_now.values())
        opened += len(open_now)
        troubled = troubles(draw)
        for step in range(first, min(400, first + draw.randrange(120))):
            surviving.append([next(troubled)(step)])
            events_now = refed.update(surviving[-1][0])
            if draw.random() < 0.3 and not any(e.kind == "spike" for e in events_now):
                loss = draw.choice([5.0, 5.0, 5.0, math.nan])
                surviving[-1].append(Evaluation(step + 1, loss, draw.choice("aaaab")))
                events_now += refed.update(surviving[-1][1])
            events += [(e.kind, dataclasses.asdict(e)) for e in events_now]
            if events_now and events_now[-1].kind == "spike":
                before = [c for c in state(*events).checkpoints if c <= events_now[-1].onset]
                events.append(rollback(draw.choice([0, *before]), attempts + 1))
                break
            if (step + 1) % 7 == 0:
                events += commits(step + 1)
    assert opened, "the histories are to have open suspicions"


DETECTOR = SpikeConfig(window=32, deviations=4.0, patience=3, confirm_steps=40)


def troubles(draw):
    """What the next step measures, given its number: quiet stretches and others."""
    while True:
        trouble, length = draw.choice(["", "", "blip", "norm", "lost", "skips"]), draw.randrange(25)
        for _ in range(length):
            hit = draw.random() < 0.6
            values = {
                "loss": draw.gauss(5.0, 0.05) + (1.0 if hit and trouble == "blip" else 0.0),
                "gradient_norm": draw.lognormvariate(5.0 if hit and trouble == "norm" else 0, 0.2),
            }
            if hit and trouble == "lost" and draw.random() < 0.3:
                values |= {"loss": math.nan, "skipped": True}
            if hit and trouble == "skips":
                values |= {"skipped": True, "loss_scale": 64.0}
            yield functools.partial(Observation, **values)


def test_a_lowered_learning_rate_holds_for_its_steps_and_falls_with_its_rollback():
    lowered = rollback(20, 2, learning_rate_factor=0.5, learning_rate_steps=10)
    rolled = state(*commits(20), lowered)
    assert [rolled.learning_rate_factor(step) for step in (0, 19, 20, 29, 30)] == [
        *(1.0, 1.0, 0.5, 0.5, 1.0)
    ]
    assert state(lowered, rollback(20, 3)).learning_rate_factor(20) == 1.0
    assert state(lowered, rollback(30, 3)).learning_rate_factor(20) == 0.5
    twice = state(lowered, rollback(25, 3, learning_rate_factor=0.5, learning_rate_steps=10))
    assert twice.learning_rate_factor(27) == 0.25


def user(step, why="user"):
    return ("segment", {"why": why, "step": step})


def test_another_recipe_goes_back_to_its_step_and_ends_the_recipes_from_there_on():
    events = [*commits(10, 20, 30), rollback(20, 2), user(25), user(40)]
    found = state(*events, user(20))
    assert found.checkpoints == (10, 20)
    assert [(r["step"], r["why"]) for r in found.segments] == [
        *((0, "start"), (20, "spike"), (20, "user"))
    ]
    assert found.seeds_by_step == [(0, 1), (20, 2)]
    assert state(user(0)).seeds_by_step == [(0, 1)]  # a recipe has no seed of its own
    # A rollback ends no recipe: what holds from step 25 on will hold there again.
    assert [r["step"] for r in state(*events, rollback(10, 3)).segments] == [0, 25, 40, 10]


def test_a_spike_is_answered_by_what_begins_at_or_before_its_confirmation():
    spiked = [*commits(10, 20), suspicion("spike", 12)]
    for answer, is_open in ((user(20), True), (user(17), False), (rollback(10, 2), False)):
        assert (state(*spiked, answer).unanswered_spike is not None) == is_open


def test_a_fork_has_the_one_checkpoint_that_it_took_along():
    assert state(*commits(10, 20), user(20, "fork")).checkpoints == (20,)
