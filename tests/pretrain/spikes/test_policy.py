"""The ladder of rollbacks: its targets, its changes, its budgets, and the checkpoints it needs."""

import dataclasses
import random
import re

import pytest

from pretrain.config.run import RunConfig
from pretrain.config.sections import SpikeConfig, TrainingConfig
from pretrain.spikes.policy import GiveUp, Rollback, max_checkpoints_kept, old, plan, protected

POLICY = SpikeConfig(margin_steps=100)
HUNDREDS = tuple(range(100, 20_000, 100))


def spike(onset, delay=50, channel="fast"):
    return {"onset": onset, "step": onset + delay, "channel": channel}


def decide(
    onset, earlier=(), checkpoints=HUNDREDS, seeds=(1,), delay=50, channel="fast", **changes
):
    policy = dataclasses.replace(POLICY, **changes)
    newest = spike(onset, delay, channel)
    saved = [step for step in checkpoints if step <= newest["step"]]
    return plan(newest, earlier, saved, seeds, policy)


def climb(onsets, checkpoints=HUNDREDS, **changes):
    """The responses to spikes that follow each other."""
    rollbacks, decisions, seeds = [], [], [1]
    for onset in onsets:
        decision = decide(onset, rollbacks, checkpoints, seeds, **changes)
        decisions.append(decision)
        if isinstance(decision, Rollback):
            rollbacks.append({**dataclasses.asdict(decision), "onset": onset})
            seeds.append(decision.seed)
    return decisions


def test_the_target_is_the_newest_checkpoint_at_least_a_margin_before_the_onset():
    assert decide(500) == Rollback(400, 2, 1)
    assert decide(499) == Rollback(300, 2, 1)
    assert decide(500, margin_steps=101) == Rollback(300, 2, 1)
    assert decide(500, margin_steps=0, checkpoints=(400, 500, 501)) == Rollback(500, 2, 1)


@pytest.mark.parametrize("channel", ["non-finite", "loss-scale"])
def test_the_first_target_for_non_finite_updates_is_the_newest_before_them(channel):
    """No update before the onset was affected, so going further back gains nothing."""
    assert decide(500, channel=channel) == Rollback(500, 2, 1)
    assert decide(499, channel=channel) == Rollback(400, 2, 1)
    assert decide(500, checkpoints=(501, 520), channel=channel).step == 0
    decisions = climb([5000, 5000, 5000, 5000], channel=channel)
    assert [getattr(decision, "step", None) for decision in decisions] == [5000, 4900, 4800, None]


def test_a_long_run_without_an_early_checkpoint_does_not_start_again_from_step_0():
    given_up = decide(95_001, checkpoints=range(96_000, 105_001, 500), delay=9999)
    assert isinstance(given_up, GiveUp)
    assert "step 95001 or later, and the oldest checkpoint left is of step 96000" in given_up.reason
    assert "a fork of a checkpoint up to step " in given_up.reason
    assert decide(1500, checkpoints=()).step == 0, "no checkpoint was saved yet"


def test_without_a_checkpoint_that_early_the_oldest_before_the_onset_is_the_target():
    """The target of the first rollback may be the only one left."""
    assert decide(450, checkpoints=(400, 440, 500)) == Rollback(400, 2, 1)


@pytest.mark.parametrize("seeds", [[0], [1], [2], [3], [4], [2**32], [3, 1, 2], [2, 7, 5]])
def test_seeds_of_successive_rollbacks_are_distinct(seeds):
    for _ in range(5):
        seeds = [*seeds, decide(500, seeds=seeds).seed]
    assert len({*seeds}) == len(seeds)


def test_a_recurring_spike_climbs_the_ladder_to_its_end():
    first, second, third, fourth = climb([5000, 5010, 4990, 5005])
    assert first == Rollback(4900, 2, 1)
    assert second == Rollback(4900, 3, 2, skip=(4910, 5061))
    assert (third.step, third.seed, third.rung, third.skip) == (4700, 4, 3, None)
    assert third.learning_rate_factor == 0.5
    assert 4700 + third.learning_rate_steps == 4990 + 1500
    assert isinstance(fourth, GiveUp)
    assert "came back after 3 rollbacks" in fourth.reason
    assert "structural" in fourth.reason


def test_a_spike_far_from_the_others_starts_at_the_first_rung():
    decisions = climb([3000, 3100, 5000, 5001, 4999])
    assert [decision.rung for decision in decisions] == [1, 2, 1, 2, 3]
    # Nor do rollbacks from more than 10,000 steps before count in a budget.
    assert climb([2000, 4000, 6000, 8000, 10_000, 12_500])[-1].rung == 1


@pytest.mark.parametrize(("onset", "rung"), [(6001, 3), (6501, 3), (7500, 3), (7501, 1), (3999, 1)])
def test_a_spike_after_the_return_of_the_rate_lowers_it_again(onset, rung):
    """The third rollback lowers it up to step 6500; a spike may be dated to before that."""
    *_, again = climb([5000, 5000, 5000, onset])
    assert again.rung == rung
    assert (again.learning_rate_factor < 1) == (rung == 3)


def test_skipped_steps_were_read_by_the_abandoned_attempt_after_the_target():
    draw = random.Random(1)
    for _ in range(300):
        onset, delay = draw.randrange(1, 3000), draw.choice([0, 5, 50, 200, 900])
        interval = draw.choice([10, 50, 500])
        earlier = [{"onset": onset, "step": 0, "rung": 1}]
        found = decide(onset, earlier, range(interval, 4000, interval), delay=delay)
        first, end = found.skip
        assert found.step <= first <= onset < end <= onset + delay + 1
        assert onset - first <= POLICY.margin_steps
        assert end - onset <= 4 * POLICY.margin_steps
    assert decide(500, [{"onset": 500, "step": 400, "rung": 1}], margin_steps=0).skip == (500, 501)


def test_the_third_rung_goes_another_margin_back():
    draw = random.Random(2)
    for _ in range(100):
        interval, margin = draw.choice([20, 70, 500]), draw.choice([0, 100])
        onset, saved = draw.randrange(6000, 9000), range(interval, 20_000, interval)
        first, _, third = climb([onset] * 3, saved, margin_steps=margin)
        assert first.step - third.step >= max(1, margin)


@pytest.mark.parametrize(
    ("onsets", "message"),
    [
        (range(500, 60_501, 3000), "follows 20 rollbacks. The instability"),
        ([2000, 4000, 6000, 8000, 10_000, 11_500], "5 rollbacks within 10,000 steps"),
    ],
)
def test_the_reason_for_giving_up_names_the_spent_budget(onsets, message):
    *before, last = climb(onsets)
    assert [type(decision) for decision in before] == [Rollback] * (len(onsets) - 1)
    assert isinstance(last, GiveUp)
    assert re.search(message, last.reason), last.reason


@pytest.mark.parametrize("interval", [10, 50, 100, 130, 500])
@pytest.mark.parametrize("channel", ["fast", "non-finite"])
def test_retention_keeps_every_target_of_the_ladder(interval, channel):
    """Law 5: with retention, each response is the same as without it."""
    for seed in range(min(100, 2 * interval)):  # small intervals have long histories
        assert_same_responses(random.Random(seed), interval, channel)


def assert_same_responses(draw, interval, channel):
    """A spike that comes back twice, as early as its last rollback's checkpoint, or later."""
    onset, policy = draw.randrange(4000, 6000), draw.choice([POLICY, SpikeConfig(margin_steps=0)])
    step, checkpoints, everything, rollbacks, seeds = 0, [], [], [], [1]
    for _ in range(3):
        alarm = onset + draw.randrange(policy.longest_delay)
        confirmed = max(alarm, onset + draw.choice([policy.slow_confirm_steps, 1000]))
        for saved in range((step // interval + 1) * interval, confirmed, interval):
            checkpoints, everything = [*checkpoints, saved], [*everything, saved]
            suspected = [onset] if saved >= alarm else []
            safe = protected(checkpoints, saved, suspected, policy)
            safe |= set(checkpoints[-2:])  # the fewest that a recipe may keep
            checkpoints = [each for each in checkpoints if each in safe]
        newest = spike(onset, confirmed - onset, channel)
        decision = plan(newest, rollbacks, checkpoints, seeds, policy)
        assert decision == plan(newest, rollbacks, everything, seeds, policy)
        rollbacks.append({**dataclasses.asdict(decision), "onset": onset})
        seeds.append(decision.seed)
        step = decision.step
        checkpoints = [each for each in checkpoints if each <= step]
        everything = [each for each in everything if each <= step]
        onset = draw.randrange(step, onset + draw.choice([1 + policy.margin_steps, 1000]))
        onset = max(step, onset - draw.choice([0, onset % interval]))
        # The user may ask for other checkpoints before the run goes on.
        shorter = max(interval // 5, min(interval, 50))
        interval = draw.choice([interval, interval, shorter, 10 * interval])
        policy = draw.choice([policy, policy, SpikeConfig(margin_steps=0)])


def test_an_open_suspicion_does_not_delete_the_targets_of_a_later_spike():
    """The gradient norm is suspected since step 900, and updates are skipped from 1000 on."""
    saved = range(10, 1011, 10)
    assert {900, 800, 1000} <= protected(saved, 1010, [900], POLICY)


@pytest.mark.parametrize(("interval", "newest"), [(20, 9), (100, 5), (500, 5), (500, 10)])
def test_random_histories_keep_no_more_checkpoints_than_the_bound(interval, newest):
    """Some keep more than half as many, so the bound is not far off."""
    seen = max(most_seen(random.Random(seed), interval, newest) for seed in range(12))
    training = TrainingConfig(steps=10**6, checkpoint_interval=interval, checkpoints_kept=newest)
    bound = max_checkpoints_kept(RunConfig(training=training, spike=POLICY))
    assert 0.5 * bound <= seen <= bound


def most_seen(draw, interval, newest):
    """Largest number of checkpoints in a random history of suspicions, healings and rollbacks."""
    step, saved, suspected, most = 0, [], {}, 0
    delays = {"slow": 2000, "gradient-norm": 200, "validation": 5000}
    for _ in range(400):
        step += interval
        saved.append(step)
        for channel, delay in delays.items():
            if draw.random() < 0.03:
                suspected[channel] = max(0, step - draw.randrange(delay))
        safe = {
            *protected(saved, step, suspected.values(), POLICY),
            *saved[-newest:],
            *old(saved, step, POLICY),
        }
        saved = [each for each in saved if each in safe]
        most = max(most, len(saved))
        if suspected and draw.random() < 0.3:
            channel = draw.choice([*suspected])
            onset = suspected.pop(channel)
            if draw.random() < 0.3:
                step = max((s for s in saved if s <= onset - POLICY.margin_steps), default=0)
                saved, suspected = [each for each in saved if each <= step], {}
    return most
