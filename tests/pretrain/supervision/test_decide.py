"""The supervisor's decisions, from the records of a ledger."""

import pytest

from pretrain.config.run import RunConfig
from pretrain.config.sections import SpikeConfig, SupervisionConfig, TrainingConfig
from pretrain.records.failures import RankError
from pretrain.spikes.policy import GiveUp
from pretrain.supervision.decide import (
    CRASH,
    HANG,
    Finished,
    Launch,
    Problem,
    answer_to_endings,
    decide,
    ending,
    endings_without_progress,
    open_attempt,
    why_ended,
)

CONFIG = RunConfig(
    training=TrainingConfig(seed=1, checkpoint_interval=100, checkpoints_kept=5),
    spike=SpikeConfig(margin_steps=100),
    supervision=SupervisionConfig(max_retries=2),
)

CREATED = ("segment", {"why": "start", "step": 0, "seed": 1})
DONE = ("done", {"step": CONFIG.training.steps})
ATTEMPT = ("attempt", {"step": 0, "attempt": 1})
PREEMPTED = ("preempted", {"step": 5, "reason": "it was asked to stop"})


def commit(step):
    return ("commit", {"step": step})


def spike(onset):
    return ("spike", {"onset": onset, "step": onset + 50, "channel": "fast"})


def crash(reason="it failed"):
    return ("crash", {"reason": reason})


def hang(reason="no heartbeat"):
    return ("hang", {"reason": reason})


def rollback(step, seed):
    fields = {"step": step, "seed": seed, "rung": 1, "onset": 350, "skip": None}
    return (
        "segment",
        {"why": "spike", **fields, "learning_rate_factor": 1.0, "learning_rate_steps": 0},
    )


def records(events):
    return [{"number": n, "kind": kind, **fields} for n, (kind, fields) in enumerate(events)]


def test_a_run_that_did_its_steps_is_finished_and_an_extended_one_goes_on():
    assert decide([], CONFIG) == Launch()
    assert decide(records([CREATED, ATTEMPT, DONE]), CONFIG) == Finished()
    assert decide(records([CREATED, ATTEMPT, ("done", {"step": 900})]), CONFIG) == Launch()


def test_failures_have_a_budget_that_progress_restores():
    for event in (crash("x"), hang("x")):
        events = [ATTEMPT, crash(), ATTEMPT, event]
        assert isinstance(decide(records(events), CONFIG), Launch)
        given_up = decide(records([*events, ATTEMPT, event]), CONFIG)
        assert isinstance(given_up, GiveUp)
        assert "3 attempts failed without a new checkpoint" in given_up.reason
        assert event[1]["reason"] in given_up.reason
        for progress in (commit(100), rollback(0, 2), ("gave-up", {"reason": "x"})):
            assert decide(records([*events, progress, event]), CONFIG) == Launch()


def test_an_attempt_that_was_asked_to_stop_did_not_fail():
    assert decide(records([ATTEMPT, PREEMPTED] * 9), CONFIG) == Launch()
    assert isinstance(decide(records([crash(), PREEMPTED, hang(), crash()]), CONFIG), GiveUp)


def test_committing_the_same_step_again_is_not_progress():
    again = [commit(100), crash("a"), ("reject", {"step": 100}), commit(100), crash("b")]
    counted = endings_without_progress(records([*again, commit(100), crash("c")]))
    assert [record["reason"] for record in counted] == ["a", "b", "c"]
    counted = endings_without_progress(records([*again, commit(200), crash("c")]))
    assert [record["reason"] for record in counted] == ["c"]
    # After a rollback, an earlier step is progress again.
    after = [commit(300), rollback(100, 2), crash("a"), commit(200), crash("b")]
    counted = endings_without_progress(records(after))
    assert [record["reason"] for record in counted] == ["b"]


def test_pauses_between_failures_grow_from_none_to_ten_seconds():
    config = SupervisionConfig(max_retries=99)
    pauses = [answer_to_endings(records([crash()] * count), config) for count in range(1, 8)]
    assert pauses == [Launch(seconds) for seconds in (0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0)]


@pytest.mark.parametrize(
    ("recorded", "seen", "preempting", "kind"),
    [
        ({"attempt", "done"}, "crash", False, ""),
        ({"attempt", "done"}, "hang", True, ""),
        ({"attempt", "spike"}, "crash", False, ""),
        ({"attempt", "preempted"}, "crash", True, ""),
        ({"attempt", "commit"}, "crash", False, "crash"),
        (set(), "crash", False, "crash"),
        ({"attempt"}, "hang", False, "hang"),
        ({"attempt"}, "hang", True, "preempted"),
        ({"attempt"}, "crash", True, "preempted"),
    ],
)
def test_record_of_an_attempt_s_end(recorded, seen, preempting, kind):
    assert ending(recorded, seen, preempting) == kind


def test_an_attempt_is_open_until_a_record_says_how_it_ended():
    assert open_attempt([]) is None
    of_a_fork = records([ATTEMPT, commit(100), ("segment", {"why": "fork", "step": 100})])
    assert open_attempt(of_a_fork) is None
    of_a_fork += records([ATTEMPT])
    assert open_attempt(of_a_fork) == of_a_fork[-1]
    for last in (crash(), hang(), PREEMPTED, spike(3), DONE):
        begun = records([ATTEMPT, commit(100)])
        assert open_attempt(begun) == begun[0]
        assert open_attempt(records([ATTEMPT, commit(100), last])) is None
        again = records([ATTEMPT, last, ATTEMPT])
        assert open_attempt(again) == again[2]


def test_an_attempt_ended_because_of_a_rank_s_error_or_what_was_seen_or_the_exit_code():
    own = RankError(1, "gpu-1", 10.0, 1, "ValueError: no")
    lost = RankError(0, "gpu-0", 10.0, 1, "Connection closed", is_secondary=True)
    hang, code = Problem(HANG, "no heartbeat"), "ended with code 1"
    assert why_ended(hang, code, [own], ["here"] * 2) == Problem(
        CRASH, "rank 1 on gpu-1: ValueError: no"
    )
    assert why_ended(hang, code, [lost], ["here"] * 2) == hang
    of_launcher = "the launcher ended with code 1 before the run was done"
    lost_too = f"rank 1 ended without a message; {of_launcher}"
    assert why_ended(None, code, [lost], ["here"] * 2) == Problem(CRASH, lost_too)
    assert why_ended(None, code, [], ["here"] * 2) == Problem(CRASH, of_launcher)
