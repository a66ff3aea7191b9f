"""The detector over plain lists of losses: when it suspects, confirms, dates and keeps quiet."""

import dataclasses
import math
import random

import pytest

from pretrain.config import SpikeConfig
from pretrain.robust import LowestLevel, SortedWindow, change_point
from pretrain.spikes import Observation, SpikeDetector
from tests.benchmarks.spikes import SPIKES, curve, told

POLICY = SpikeConfig(window=64, minimum_history=32, patience=4, confirm_steps=10, margin_steps=20)


def decay(steps, seed=1, noise=0.05):
    """A loss that decays from 8 nats to 3, with noise."""
    draw = random.Random(seed)
    return [3.0 + 5.0 * math.exp(-step / 200) + draw.gauss(0.0, noise) for step in range(steps)]


def raised(losses, first, last, rise):
    return [loss + (rise if first <= step < last else 0.0) for step, loss in enumerate(losses)]


def observed(losses, **channels):
    """Records of losses; each channel gives the value of a step, or None for the usual one."""
    for step, loss in enumerate(losses):
        given = {name: value(step) for name, value in channels.items()}
        yield Observation(step, loss, **{k: v for k, v in given.items() if v is not None})


def events(records, policy=POLICY, changes=()):
    """What is said until the first spike, as the loop would hear it."""
    detector, said = SpikeDetector(policy, changes), []
    for record in records:
        said += detector.update(record)
        if said and said[-1].kind == "spike":
            break
    return said


def of(losses, policy=POLICY, changes=()):
    return events(observed(losses), policy, changes)


def kinds(said):
    return [(event.kind, event.channel) for event in said]


@pytest.mark.parametrize("seed", range(10))
def test_a_clean_noisy_decay_says_nothing(seed):
    assert of(decay(3000, seed), SpikeConfig()) == []
    assert of(decay(3000, seed, noise=0.3), SpikeConfig()) == []


@pytest.mark.parametrize("seed", range(6))
def test_a_clean_power_law_with_heavy_tails_says_nothing(seed):
    assert told(curve("clean", seed, 4000).losses) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("onset", "rise"), [(300, 2.0), (500, 1.0), (999, 0.7)])
def test_a_lasting_rise_is_suspected_soon_and_confirmed_with_its_onset(seed, onset, rise):
    suspect, spike = of(raised(decay(1200, seed), onset, 1200, rise))
    assert kinds([suspect, spike]) == [("suspect", "fast"), ("spike", "fast")]
    assert suspect.onset == spike.onset == onset
    assert suspect.step - onset <= 8
    assert spike.step == onset + POLICY.confirm_steps
    assert spike.loss - spike.baseline == pytest.approx(rise, abs=0.4)


@pytest.mark.parametrize("kind", SPIKES)
def test_every_kind_of_labelled_spike_is_found_in_time_and_dated(kind):
    dated = []
    for seed in range(4):
        labelled = curve(kind, seed)
        said = told(labelled.losses)
        spike = next(event for event in said if event.kind == "spike")
        suspect = next((event for event in said if event.onset == spike.onset), spike)
        assert suspect.step <= labelled.onset + (200 if kind == "divergence" else 50)
        dated.append(abs(spike.onset - labelled.onset))
    assert sorted(dated)[1] <= (50 if kind == "divergence" else 10), dated


@pytest.mark.parametrize("seed", range(6))
def test_a_level_that_shifts_early_on_a_falling_loss_does_not_hide(seed):
    """At record 700 the clean loss still falls by a third of the shift in 100 records."""
    losses = curve("clean", 2 * seed + 1, 1200).losses.copy()
    losses[700:] += 0.3
    spike = told(losses)[-1]
    assert spike.kind == "spike"
    assert abs(spike.onset - 700) <= 10


@pytest.mark.parametrize("seed", range(10))
def test_a_blip_that_heals_is_no_spike(seed):
    said = of(raised(decay(1200, seed), 500, 507, 1.0))
    assert kinds(said) == [("suspect", "fast"), ("healed", "fast")]
    assert said[1].onset == 500
    assert said[1].step <= 500 + 7 + POLICY.patience


@pytest.mark.parametrize("seed", range(12))
def test_labelled_blips_cause_no_rollback(seed):
    assert "spike" not in {event.kind for event in told(curve("blip", seed, 3000).losses)}


def test_a_few_outliers_are_not_even_a_suspicion():
    losses = decay(1000)
    for step in (400, 430, 431, 500, 700, 701, 702):
        losses[step] += 2.0
    assert of(losses) == []


def test_a_second_rise_after_a_healed_one_is_judged_by_itself():
    said = of(raised(raised(decay(1200), 500, 507, 1.0), 600, 1200, 1.0))
    assert [event.kind for event in said] == ["suspect", "healed", "suspect", "spike"]
    assert said[-1].onset == 600


def test_outliers_do_not_raise_the_bar_for_those_that_follow():
    """With outliers in the window, the second of these rises would hide behind the first."""
    losses = decay(1200)
    for first in range(400, 1000, 6):  # a third of all losses, never `patience` of the last six
        losses = raised(losses, first, first + 2, 4.0)
    said = of(raised(losses, 1003, 1200, 0.8))
    assert said[-1].kind == "spike"
    assert said[-1].onset in range(1000, 1004)


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rise_that_heals_is_one_suspicion_and_no_spike(seed):
    said = of(raised(decay(2000, seed), 1000, 1100, 0.2), SpikeConfig())
    assert kinds(said) == [("suspect", "slow"), ("healed", "slow")]
    assert abs(said[0].onset - 1000) <= 5
    assert said[1].step <= 1100 + 32


def test_a_slow_rise_that_has_become_fast_waits_no_longer_than_a_fast_one():
    losses = raised(raised(decay(2000), 1000, 2000, 0.2), 1100, 2000, 0.8)
    said = of(losses, SpikeConfig())
    assert kinds(said) == [("suspect", "slow"), ("spike", "slow")]
    assert abs(said[0].onset - 1000) <= 5
    assert said[1].step <= 1100 + 50 + 10


def test_a_gross_rise_needs_no_waiting():
    (spike,) = of(raised(decay(1000), 600, 1000, 3.5))
    assert spike.kind == "spike"
    assert (spike.onset, spike.step) == (600, 600 + POLICY.patience - 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 5, 700])
def test_a_loss_that_is_not_finite_is_a_spike_at_once_whenever_it_comes(bad, step):
    losses = decay(1000)
    losses[step] = bad
    (spike,) = of(losses)
    assert (spike.kind, spike.channel, spike.step, spike.onset) == (
        "spike",
        "non-finite",
        step,
        step,
    )
    assert repr(spike.loss) == repr(bad)


def test_a_run_that_stays_broken_is_one_spike():
    assert len(told([3.0] * 100 + [math.nan] * 500)) == 1


def test_a_loss_that_breaks_while_suspected_has_the_suspicion_s_onset():
    losses = raised(decay(1000), 600, 1000, 1.0)
    losses[606] = math.nan
    suspect, spike = of(losses)
    assert suspect.onset == spike.onset == 600
    assert spike.step == 606


def test_an_update_that_loss_scaling_skipped_is_no_broken_loss():
    losses = decay(1000)
    losses[606] = math.inf
    skips = observed(losses, skipped=lambda step: step == 606, loss_scale=lambda step: 1024.0)
    assert events(skips) == []


def test_nothing_but_a_broken_loss_is_judged_before_there_is_a_history():
    assert of([8.0] * 20 + [12.0] * 11) == []
    assert kinds(of([8.0] * 33 + [12.0] * 11)) == [("spike", "fast")]


def test_a_loss_that_does_not_move_makes_no_outlier_of_rounding():
    assert of([3.0] * 200 + [3.0 + 1e-4] * 200) == []


def test_a_raised_gradient_norm_is_suspected_and_never_confirmed():
    norms = {"gradient_norm": lambda step: 30.0 if step >= 500 else 1.0 + step % 7 / 70}
    said = events(observed(decay(1500), **norms))
    assert kinds(said) == [("suspect", "gradient-norm"), ("healed", "gradient-norm")]
    assert said[0].onset == 500
    assert said[1].step - said[0].step == POLICY.slow_confirm_steps


def test_a_raised_gradient_norm_holds_a_suspicion_open_that_would_have_healed():
    losses = raised(decay(1500), 500, 507, 1.0)
    norms = {"gradient_norm": lambda step: 30.0 if 500 <= step < 560 else 1.0 + step % 7 / 70}
    said = events(observed(losses, **norms))
    assert {event.kind for event in said} == {"suspect", "healed"}
    assert next(e.step for e in said if kinds([e]) == [("healed", "fast")]) >= 560


def test_what_a_raised_gradient_norm_held_open_is_not_confirmed_by_the_next_blip():
    losses = raised(raised(decay(1500), 500, 507, 1.0), 540, 547, 1.0)
    norms = {"gradient_norm": lambda step: 30.0 if 500 <= step < 560 else 1.0 + step % 7 / 70}
    assert {event.kind for event in events(observed(losses, **norms))} == {"suspect", "healed"}


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_smallest_windows_work(window):
    sizes = {"window": window, "minimum_history": 1, "slow_window": window, "patience": 1}
    assert of([3.0] * 50 + [9.0] * 50, SpikeConfig(**sizes))[-1].kind == "spike"


def test_a_loss_scale_that_falls_without_end_is_a_spike_and_one_that_settles_is_none():
    settles = observed(decay(600), skipped=lambda s: 200 <= s < 208, loss_scale=lambda s: 8.0)
    assert kinds(events(settles)) == [("suspect", "loss-scale"), ("healed", "loss-scale")]
    falls = observed(decay(600), skipped=lambda s: s >= 200, loss_scale=lambda s: 8.0)
    suspect, spike = events(falls)
    assert (spike.channel, spike.onset, suspect.step) == ("loss-scale", 200, 203)
    assert spike.step - suspect.step == POLICY.confirm_steps
    at_minimum = observed(decay(210), skipped=lambda s: s == 200, loss_scale=lambda s: 1.0)
    assert kinds(events(at_minimum))[0] == ("suspect", "loss-scale")


def test_a_validation_loss_that_jumps_is_confirmed_by_the_next_evaluation():
    def validation(values):
        return {"validation_loss": lambda step: values.get(step)}

    fine = {99: 4.0, 199: 3.8, 299: 3.85}
    assert events(observed(decay(800), **validation(fine))) == []
    healed = events(observed(decay(800), **validation({**fine, 399: 4.5, 499: 3.7})))
    assert kinds(healed) == [("suspect", "validation"), ("healed", "validation")]
    suspect, spike = events(observed(decay(800), **validation({**fine, 399: 4.5, 499: 4.4})))
    assert (spike.kind, spike.channel, spike.step) == ("spike", "validation", 499)
    assert suspect.onset == spike.onset == 300, "somewhere after the last good evaluation"
    assert (spike.loss, spike.baseline) == (4.4, 3.85)
    creeping = {step: 3.0 + step / 250 for step in range(99, 800, 100)}
    assert events(observed(decay(800), **validation(creeping))) == [], "this is overfitting"


def test_a_declared_change_may_raise_the_loss():
    losses = raised(decay(1500), 800, 1500, 0.8)
    assert kinds(of(losses))[-1] == ("spike", "fast")
    assert of(losses, changes=[800]) == []
    assert of(losses, changes=[400, 800, 1200]) == []


def test_after_a_declared_change_a_gross_rise_is_seen_at_once_and_others_when_there_is_history():
    gross = of(raised(decay(1500), 810, 1500, 4.0), changes=[800])
    assert (gross[-1].kind, gross[-1].onset) == ("spike", 810)
    later = of(raised(decay(1500), 900, 1500, 0.8), changes=[800])
    assert (later[-1].kind, later[-1].onset) == ("spike", 900)


def test_a_suspicion_that_is_open_at_a_declared_change_is_judged_first():
    said = of(raised(decay(1500), 795, 1500, 1.0), changes=[800])
    assert (said[-1].kind, said[-1].onset) == ("spike", 795)


def test_steps_need_not_follow_each_other():
    """A curve logged every 5 steps: thresholds count records."""
    losses = raised(decay(1200), 600, 1200, 1.0)
    suspect, spike = events(Observation(5 * step, loss) for step, loss in enumerate(losses))
    assert suspect.onset == spike.onset == 3000
    assert spike.step == 5 * (600 + POLICY.confirm_steps)


def records_of_a_troubled_run(seed):
    """Blips, a level shift, norms, skips and evaluations on one curve."""
    draw = random.Random(seed)
    losses = decay(1400, seed)
    for _ in range(4):
        first = draw.randrange(100, 1300)
        losses = raised(losses, first, first + draw.choice([2, 5, 7, 40]), draw.choice([0.5, 1, 4]))
    losses = raised(losses, draw.randrange(200, 1400), 1400, 0.4)
    return [
        Observation(
            step,
            loss,
            gradient_norm=draw.lognormvariate(0, 0.3) * (20 if step // 20 % 9 == 5 else 1),
            loss_scale=64.0,
            skipped=draw.random() < (0.8 if step // 30 % 11 == 7 else 0.01),
            validation_loss=loss if step % 100 == 99 else None,
        )
        for step, loss in enumerate(losses)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_the_state_folded_again_is_the_state_that_lived(seed):
    """Law 6: cut anywhere, feed a new detector what came before, and go on the same."""
    records, changes = records_of_a_troubled_run(seed), [300, 900]
    lived = SpikeDetector(POLICY, changes)
    straight = [lived.update(record) for record in records]
    assert {event.kind for said in straight for event in said} >= {"suspect", "healed"}
    for cut in random.Random(seed).sample(range(1400), 3):
        folded = SpikeDetector(POLICY, changes)
        for record in records[:cut]:
            folded.update(record)
        assert [folded.update(record) for record in records[cut:]] == straight[cut:]


def test_events_are_plain_numbers():
    import json

    for event in of(raised(decay(1000), 600, 1000, 1.0)):
        assert json.loads(json.dumps(dataclasses.asdict(event))) == dataclasses.asdict(event)


@pytest.mark.parametrize("seed", range(5))
def test_a_sorted_window_has_the_statistics_of_its_values(seed):
    import numpy as np

    draw, window, values = random.Random(seed), SortedWindow(40), []
    for _ in range(300):
        if values and draw.random() < 0.2:
            window.pop()
            values.pop()
        else:
            value = draw.choice([draw.gauss(0, 1), 0.5])
            values.append(value)
            assert window.append(value) == (values.pop(0) if len(values) > 40 else None)
        assert len(window) == len(values)
        if values:
            assert window.median() == pytest.approx(np.median(values))


def test_the_deviation_is_that_of_a_normal_distribution_whatever_a_tenth_of_the_values():
    draw, window = random.Random(1), SortedWindow(4000)
    for number in range(4000):
        window.append(draw.gauss(5.0, 2.0) if number % 10 else 1e6)
    assert window.deviation() == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_the_lowest_level_is_that_of_the_last_medians(seed):
    import numpy as np

    draw, level, losses = random.Random(seed), LowestLevel(8, 20), []
    for record in range(1, 200):
        losses.append(draw.gauss(0, 1))
        level.append(record, losses[-1])
        medians = [np.median(losses[end - 8 : end]) for end in range(8, record + 1)][-20:]
        if medians:
            assert level.rise == pytest.approx(medians[-1] - min(medians))


@pytest.mark.parametrize("height", [2.0, 3.0, 50.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_change_point_is_where_the_rise_begins(height, seed):
    draw = random.Random(seed)
    distances = [draw.gauss(0, 1) for _ in range(100)]
    distances[20] += 40.0  # an outlier dates nothing
    rising = distances[:70] + [distance + height for distance in distances[70:]]
    assert abs(change_point(rising, 2.0) - 70) <= (8 if height < 3 else 4)
