"""Whether the first losses after a resume continue the run."""

import random

import pytest

from pretrain.config.run import RunConfig
from pretrain.config.sections import BatchConfig
from pretrain.data.lineage import Lineage
from pretrain.records import ledger
from pretrain.train.continuity import continuity_check, discontinuity, recorded_losses
from pretrain.train.resume import Start
from tests.pretrain.builders import step_record


def lines(attempt, seed, losses):
    return [
        {"attempt": attempt, "seed": seed, "step": step, "loss": loss}
        for step, loss in losses.items()
    ]


def test_the_losses_to_repeat_are_those_of_the_same_seed_and_micro_batches():
    measured = [
        *lines(1, 1, {8: 5.8, 9: 5.9, 10: 5.0, 11: 5.1, 12: 5.2, 13: 5.3, 14: 5.4}),
        *lines(2, 1, {10: 6.0, 11: 6.1}),
        *lines(3, 2, {10: 7.0}),
    ]
    assert recorded_losses(measured, 10, 1, {1}) == [5.0, 5.1, 5.2, 5.3]
    assert recorded_losses(measured, 10, 1, {1, 2, 3}) == [6.0, 6.1, 5.2, 5.3]
    assert recorded_losses(measured, 10, 2, {1, 2, 3}) == [7.0]
    assert recorded_losses(measured, 10, 3, {1, 2, 3}) == []
    assert recorded_losses(measured, 13, 1, {1}) == [5.3, 5.4]
    assert recorded_losses([], 0, 1, set()) == []


@pytest.mark.parametrize(
    ("losses", "recorded", "reason"),
    [
        ([5.0], [5.0, 5.1], ""),
        ([5.00001, 5.101], [5.0, 5.1], ""),
        ([5.0002], [5.0, 5.1], "loss 5.000200 where the same step, done before, had 5.000000"),
        ([5.0, 5.12], [5.0, 5.1], "loss 5.120000 where the same step, done before, had 5.100000"),
        ([float("nan")], [5.0], "loss nan where"),
        ([5.0, 5.1, 9.0, 9.0], [5.0, 5.1], ""),
    ],
)
def test_steps_done_again_have_the_same_loss(losses, recorded, reason):
    assert discontinuity(losses, recorded, [3.0] * 40, 6.0).startswith(reason)
    assert bool(discontinuity(losses, recorded, [3.0] * 40, 6.0)) == bool(reason)


def test_after_a_reseed_the_first_losses_lie_among_those_before():
    noise = random.Random(1)
    history = [3.0 + noise.gauss(0, 0.05) for _ in range(100)]

    def reason(*losses):
        return discontinuity(losses, [], history, 6.0)

    assert reason(3.1, 2.9, 3.05, 3.0) == ""
    assert reason(3.0, 9.0, 3.0, 3.0) == "", "one loss alone may be an outlier"
    assert "median loss 4.0000, outside 2.99" in reason(4.0, 4.0, 4.0, 4.0)
    assert "median loss 2.0000" in reason(2.0, 2.0, 2.0, 2.0), "as after data that was seen before"
    assert reason(4.0, 4.0, 4.0) == "", "too few to say"
    assert discontinuity([4.0] * 4, [], history[:10], 6.0) == "", "too little before"


def test_noise_and_a_falling_loss_are_no_discontinuity():
    noise = random.Random(2)
    for start in range(2000):
        fall = noise.choice([0.0, 0.001, 0.02, 0.1])
        curve = [9.0 - fall * i + noise.gauss(0, 0.05) for i in range(36)]
        assert discontinuity(curve[32:], [], curve[:32], 6.0) == "", (start, fall)


def test_losses_that_were_not_finite_are_no_discontinuity():
    """A line of metrics.jsonl has null there."""
    measured = lines(1, 1, {10: None, 11: 5.1})
    recorded = recorded_losses(measured, 10, 1, {1})
    history = [float("nan")] * 8 + [3.0, 3.1] * 40
    assert discontinuity([float("nan"), 5.1], recorded, history, 6.0) == ""
    assert "had 5.100000" in discontinuity([5.0, 5.2], recorded, history, 6.0)
    assert discontinuity([3.0] * 4, [], history, 6.0) == ""
    assert "median loss 9.0" in discontinuity([9.0] * 4, [], history, 6.0)


def test_a_discontinuity_is_reported_once():
    records = [{"kind": "attempt", "attempt": 1, "micro_batch_size": 1}]
    state = ledger.run_state([], 1)
    start = Start(2, "t", 10, state, Lineage.begin(10, 1), share_of_tokens=1.0, checkpoint_size=0)
    reports = []
    observe = continuity_check(
        RunConfig(batch=BatchConfig(global_batch_size=1, micro_batch_size=1)),
        start,
        records,
        lines(1, 1, {9: 5.1, 10: 5.0, 11: 4.9}),
        [],
        lambda *report: reports.append(report),
    )
    for step, loss in enumerate((5.5, 6.5, 7.5), start=10):
        observe(step_record(step, loss, seed=1))
    ((step, reason),) = reports
    assert (step, reason.partition(" where")[0]) == (10, "loss 5.500000")


def reported(changes, first_step, losses):
    """Steps where an attempt reports a discontinuity, after 80 steps of another seed at 3 nats."""
    start = Start(2, "t", first_step, ledger.run_state([], 2), Lineage.begin(10, 2), 1.0, 0)
    before = lines(1, 1, {step: 3.0 if step < 80 else 5.0 for step in range(first_step)})
    reports = []
    observe = continuity_check(
        RunConfig(), start, [], before, changes, lambda *report: reports.append(report[0])
    )
    for step, loss in enumerate(losses, start=first_step):
        observe(step_record(step, loss, seed=2))
    return reports


@pytest.mark.parametrize(
    ("first_step", "losses"),
    [(80, [5.0] * 4), (79, [3.0, 5.0, 5.0, 5.0]), (90, [5.0] * 4)],
    ids=["there", "after the first step", "before"],
)
def test_another_level_that_a_declared_change_brings_is_no_discontinuity(first_step, losses):
    assert reported([40, 80, 400], first_step, losses) == []
    assert reported([40, 400], first_step, losses) == [first_step + 3]


def test_where_enough_steps_follow_a_declared_change_only_they_are_compared():
    assert reported([80], 112, [5.0] * 4) == []
    assert reported([80], 112, [3.0] * 4) == [115]
    assert reported([80, 116], 112, [3.0] * 4) == [115]
