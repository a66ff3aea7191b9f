"""The detector over plain lists of losses, and the policy over plain numbers."""

import math
import random

import pytest

from pretrain.config import SpikeConfig
from pretrain.spikes import GiveUp, Rollback, SpikeDetector, plan

POLICY = SpikeConfig(
    window=64, minimum_history=32, patience=4, confirm_steps=10, gross_nats=3.0, margin_steps=20
)


def clean(steps, seed=0, noise=0.05):
    """A loss that decays from 8 nats to 3, with noise."""
    draw = random.Random(seed)
    return [3.0 + 5.0 * math.exp(-step / 200) + draw.gauss(0.0, noise) for step in range(steps)]


def raised(losses, first, last, rise):
    return [loss + (rise if first <= step < last else 0.0) for step, loss in enumerate(losses)]


def events(losses, policy=POLICY, first_step=0):
    """What is said until the first spike, as the loop would hear it."""
    detector, said = SpikeDetector(policy), []
    for step, loss in enumerate(losses, start=first_step):
        event = detector.update(step, loss)
        if event is not None:
            said.append(event)
            if event.kind == "spike":
                break
    return said


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_noisy_decay_says_nothing(seed):
    assert events(clean(3000, seed)) == []
    assert events(clean(3000, seed, noise=0.3), SpikeConfig()) == []


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("onset", "rise"), [(300, 2.0), (500, 1.0), (999, 0.7)])
def test_a_lasting_rise_is_suspected_soon_and_confirmed_with_its_onset(seed, onset, rise):
    suspect, spike = events(raised(clean(1200, seed), onset, 1200, rise))
    assert (suspect.kind, spike.kind) == ("suspect", "spike")
    assert suspect.onset == spike.onset == onset
    assert suspect.step - onset <= 8
    assert spike.step == onset + POLICY.confirm_steps
    assert spike.loss - spike.baseline == pytest.approx(rise, abs=0.4)


@pytest.mark.parametrize("seed", range(10))
def test_a_blip_that_heals_is_no_spike(seed):
    said = events(raised(clean(1200, seed), 500, 507, 1.0))
    assert [event.kind for event in said] == ["suspect", "healed"]
    assert said[1].onset == 500
    assert said[1].step <= 500 + 7 + POLICY.patience


def test_a_few_outliers_are_not_even_a_suspicion():
    losses = clean(1000)
    for step in (400, 430, 431, 500, 700, 701, 702):
        losses[step] += 2.0
    assert events(losses) == []


def test_a_second_rise_after_a_healed_one_is_judged_by_itself():
    losses = raised(raised(clean(1200), 500, 507, 1.0), 600, 1200, 1.0)
    said = events(losses)
    assert [event.kind for event in said] == ["suspect", "healed", "suspect", "spike"]
    assert said[-1].onset == 600


def test_outliers_do_not_raise_the_bar_for_those_that_follow():
    """With outliers in the window, the second of these rises would hide behind the first."""
    losses = clean(1200)
    for first in range(400, 1000, 6):  # half of all losses, never `patience` of the last six
        losses = raised(losses, first, first + 3, 4.0)
    said = events(raised(losses, 1003, 1200, 0.8))
    assert [event.kind for event in said][-1] == "spike"
    assert said[-1].onset == 1003


def test_a_gross_rise_needs_no_waiting():
    (spike,) = events(raised(clean(1000), 600, 1000, 3.5))
    assert spike.kind == "spike"
    assert (spike.onset, spike.step) == (600, 600 + POLICY.patience - 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 5, 700])
def test_a_loss_that_is_not_finite_is_a_spike_at_once_whenever_it_comes(bad, step):
    losses = clean(1000)
    losses[step] = bad
    (spike,) = events(losses)
    assert (spike.kind, spike.step, spike.onset) == ("spike", step, step)
    assert repr(spike.loss) == repr(bad)


def test_a_loss_that_breaks_while_suspected_has_the_suspicion_s_onset():
    losses = raised(clean(1000), 600, 1000, 1.0)
    losses[606] = math.nan
    suspect, spike = events(losses)
    assert suspect.onset == spike.onset == 600
    assert spike.step == 606


def test_nothing_is_judged_before_there_is_a_history():
    losses = [8.0] * 20 + [12.0] * 11
    assert events(losses) == []
    assert [event.kind for event in events([8.0] * 32 + [12.0] * 11)] == ["spike"]


def test_a_loss_that_does_not_move_makes_no_outlier_of_rounding():
    assert events([3.0] * 200 + [3.0 + 1e-4] * 200) == []


@pytest.mark.parametrize("seed", range(30))
def test_the_state_folded_again_is_the_state_that_lived(seed):
    """Law 6: cut anywhere, feed a new detector what came before, and go on the same."""
    draw = random.Random(seed)
    losses = clean(700, seed)
    for _ in range(4):
        first = draw.randrange(100, 690)
        losses = raised(losses, first, first + draw.choice([2, 5, 7]), draw.choice([0.5, 1, 2]))
    cut = draw.randrange(700)

    def said(detector, part):
        return [detector.update(step, losses[step]) for step in part]

    lived, folded = SpikeDetector(POLICY), SpikeDetector(POLICY)
    said(lived, range(cut))
    said(folded, range(cut))
    fresh = SpikeDetector(POLICY)
    straight = said(fresh, range(700))
    assert said(folded, range(cut, 700)) == said(lived, range(cut, 700)) == straight[cut:]


def decide(onset=500, checkpoints=(100, 200, 300, 400), seeds=(1,), rollbacks=0, margin=100):
    return plan(
        onset, checkpoints, seeds, rollbacks, SpikeConfig(margin_steps=margin, max_rollbacks=2)
    )


def test_the_newest_checkpoint_at_least_a_margin_before_the_onset_is_taken():
    assert decide() == Rollback(400, 2)
    assert decide(onset=499) == Rollback(300, 2)
    assert decide(margin=101) == Rollback(300, 2)
    assert decide(margin=0, checkpoints=(400, 500, 501)) == Rollback(500, 2)


def test_a_checkpoint_that_saw_the_rise_is_never_taken():
    assert decide(checkpoints=(501, 600, 700)).step == 0
    assert decide(checkpoints=()).step == 0


def test_where_none_is_that_early_the_oldest_from_before_the_rise_is_better_than_none():
    """The first rollback's checkpoint may be the only one left: the run must not start anew."""
    assert decide(onset=450, checkpoints=(400, 440, 500)) == Rollback(400, 2)


@pytest.mark.parametrize("seeds", [(1,), (3, 1, 2), (7, 9), (0,)])
def test_the_seed_was_never_used_before(seeds):
    assert decide(seeds=seeds).seed not in seeds


def test_when_the_budget_is_spent_it_gives_up_and_says_why():
    assert isinstance(decide(rollbacks=1), Rollback)
    given_up = decide(rollbacks=2)
    assert isinstance(given_up, GiveUp)
    assert "2 rollbacks did not help" in given_up.reason
    assert "structural" in given_up.reason
