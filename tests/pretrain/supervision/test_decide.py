"""What follows from a ledger when no attempt is running."""

import pytest

from pretrain.config.run import RunConfig, SpikeConfig, SupervisionConfig, TrainingConfig
from pretrain.spikes.policy import GiveUp, Rollback
from pretrain.supervision import decide as ladders
from pretrain.supervision.decide import Finished, Launch, decide

CONFIG = RunConfig(
    training=TrainingConfig(seed=1, checkpoint_interval=100, checkpoints_kept=5),
    spike=SpikeConfig(margin_steps=100),
    supervision=SupervisionConfig(max_crashes=2, max_hangs=1, max_preemptions=3, max_stalled=4),
)

CREATED, DONE = ("created", {}), ("done", {"step": 900})
ATTEMPT = ("attempt", {"step": 0, "attempt": 1})
PREEMPTED = ("preempted", {"step": 5, "reason": "it was asked to leave"})


def commit(step):
    return ("commit", {"step": step})


def spike(onset):
    return ("spike", {"onset": onset, "step": onset + 50, "channel": "fast"})


def crash(reason="it fell over"):
    return ("crash", {"reason": reason})


def hang(reason="nothing was heard of it"):
    return ("hang", {"reason": reason})


def rollback(step, seed):
    fields = {"step": step, "seed": seed, "rung": 1, "onset": 350, "skip": None}
    return ("rollback", {**fields, "learning_rate_factor": 1.0, "learning_rate_steps": 0})


def records(events):
    return [{"number": n, "kind": kind, **fields} for n, (kind, fields) in enumerate(events)]


@pytest.mark.parametrize(
    ("told", "events", "decision"),
    [
        ("nothing yet", [], Launch()),
        ("created", [CREATED], Launch()),
        ("killed with its supervisor", [CREATED, ATTEMPT, commit(100)], Launch()),
        ("crashed once", [CREATED, ATTEMPT, crash()], Launch()),
        ("done", [CREATED, ATTEMPT, commit(900), DONE], Finished()),
        ("done after a crash", [CREATED, ATTEMPT, crash(), ATTEMPT, DONE], Finished()),
        ("asked to leave", [CREATED, ATTEMPT, commit(5), PREEMPTED], Launch()),
        (
            "rolled back already",
            [ATTEMPT, commit(100), spike(350), rollback(100, 2)],
            Launch(),
        ),
    ],
)
def test_what_follows_from_a_ledger(told, events, decision):
    assert decide(records(events), CONFIG) == decision


def test_a_spike_is_rolled_back_even_if_its_launcher_fell_over_on_the_way_out():
    told = [ATTEMPT, commit(100), commit(200), commit(300), spike(350)]
    for events in (told, [*told, crash()]):
        decision = decide(records(events), CONFIG)
        assert isinstance(decision, Rollback)
        assert (decision.step, decision.seed) == (200, 2)


def test_each_kind_of_ending_has_a_budget_that_progress_restores():
    for ending, most in ((crash("x"), 2), (hang("x"), 1), (PREEMPTED, 3)):
        events = [ATTEMPT, ending] * most
        assert isinstance(decide(records(events), CONFIG), Launch)
        given_up = decide(records([*events, ATTEMPT, ending]), CONFIG)
        assert isinstance(given_up, GiveUp)
        assert f"{most + 1} attempts" in given_up.reason
        assert "without a new checkpoint" in given_up.reason
        assert ending[1]["reason"] in given_up.reason
        for progress in (commit(100), rollback(0, 2), ("gave-up", {"reason": "x"})):
            assert decide(records([*events, progress, ending]), CONFIG) == Launch()


def test_the_budgets_are_apart_and_all_endings_together_have_one():
    some = [crash(), hang(), crash(), PREEMPTED]
    assert isinstance(decide(records(some), CONFIG), Launch)
    decision = decide(records([*some, PREEMPTED]), CONFIG)
    assert isinstance(decision, GiveUp)
    assert "5 attempts ended without a new checkpoint" in decision.reason


def test_a_step_committed_again_and_again_is_no_progress():
    again = [commit(100), crash("a"), ("reject", {"step": 100}), commit(100), crash("b")]
    counted = ladders.endings_without_progress(records([*again, commit(100), crash("c")]))
    assert [record["reason"] for record in counted] == ["a", "b", "c"]
    counted = ladders.endings_without_progress(records([*again, commit(200), crash("c")]))
    assert [record["reason"] for record in counted] == ["c"]
    # What was reached before a rollback is to be reached again.
    after = [commit(300), rollback(100, 2), crash("a"), commit(200), crash("b")]
    counted = ladders.endings_without_progress(records(after))
    assert [record["reason"] for record in counted] == ["b"]


def test_the_pauses_between_failures_grow_to_ten_seconds_and_the_first_has_none():
    config = SupervisionConfig(max_crashes=99, max_stalled=99)
    pauses = [
        ladders.answer_to_endings(records([crash()] * count), config) for count in range(1, 8)
    ]
    assert pauses == [Launch(seconds) for seconds in (0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0)]


@pytest.mark.parametrize(
    ("told", "seen", "preempting", "kind"),
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
def test_how_an_attempt_ended(told, seen, preempting, kind):
    assert ladders.ending(told, seen, preempting) == kind


def test_an_attempt_is_open_until_something_says_how_it_ended():
    assert ladders.open_attempt([]) is None
    for last in (crash(), hang(), PREEMPTED, spike(3), DONE, ("interrupted", {})):
        begun = records([ATTEMPT, commit(100)])
        assert ladders.open_attempt(begun) == begun[0]
        assert ladders.open_attempt(records([ATTEMPT, commit(100), last])) is None
        again = records([ATTEMPT, last, ATTEMPT])
        assert ladders.open_attempt(again) == again[2]


def test_the_records_of_an_attempt_are_those_since_its_token():
    told = records([("attempt", {"token": "a"}), crash(), ("attempt", {"token": "b"}), commit(1)])
    assert ladders.records_of(told, "b") == told[2:]
    assert ladders.records_of(told, "c") == []
