"""The detector over plain lists of losses: when it suspects, confirms, dates and keeps quiet."""

import dataclasses
import math
import random

import pytest

from pretrain.config.run import SpikeConfig
from pretrain.spikes.detector import Observation, SpikeDetector
from pretrain.spikes.statistics import SLACK, LowestLevel, SortedWindow, change_point
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


# --- updates that are not finite ------------------------------------------------------------------

LOST = ("suspect", "non-finite"), ("healed", "non-finite"), ("spike", "non-finite")


def lost(steps, wrong, policy=POLICY, what="loss", **channels):
    """What is said where the updates of some steps were skipped: their loss or gradient was NaN."""
    losses = [math.nan if what == "loss" and wrong(s) else loss for s, loss in enumerate(steps)]
    return events(observed(losses, skipped=wrong, **channels), policy)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_one_lost_update_is_suspected_at_once_and_heals(what):
    suspect, healed = lost(decay(1000), lambda step: step == 600, what=what)
    assert kinds([suspect, healed]) == [*LOST[:2]]
    assert suspect.onset == healed.onset == suspect.step == 600
    assert healed.step == 600 + POLICY.patience + SLACK
    assert suspect.baseline == pytest.approx(3.0 + 5.0 * math.exp(-3), abs=0.1)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("first", [0, 5, 600])
def test_lost_updates_without_end_are_a_spike_when_most_of_the_last_were(first, what):
    suspect, spike = lost(decay(1000), lambda step: step >= first, SpikeConfig(), what)
    assert kinds([suspect, spike]) == [LOST[0], LOST[2]]
    assert (suspect.step, spike.step, spike.onset) == (first, first + 5, first)


@pytest.mark.parametrize("period", range(2, 10))
def test_lost_updates_that_come_again_and_again_are_a_spike(period):
    """Each may heal before the next: they are counted over the whole window."""
    said = lost(decay(4000), lambda s: s >= 600 and s % period == 0, SpikeConfig())
    spike, first = said[-1], -(-600 // period) * period
    assert (spike.kind, spike.channel) == LOST[2]
    assert spike.onset == first
    assert spike.step <= first + 26 * period
    assert (LOST[1] in kinds(said)) == (period == 9)


def test_few_lost_updates_are_no_spike_however_long_it_goes_on():
    said = lost(decay(4000), lambda s: s % 12 == 0, SpikeConfig())
    assert {*kinds(said)} == {*LOST[:2]}


def test_groups_of_lost_updates_are_a_spike_whose_onset_is_in_the_window():
    """Three of every 40 are less than a tenth, and heal in between; then five of them."""
    said = lost(decay(4000), lambda s: s % 40 < (3 if s < 1200 else 5), SpikeConfig())
    *before, spike = said
    assert {*kinds(before)} == {*LOST[:2]}
    assert (spike.kind, spike.channel) == LOST[2]
    assert spike.step >= 1200
    assert spike.onset == next(s for s in range(spike.step - 255, 1200) if s % 40 < 3)


def test_a_few_lost_updates_are_no_tenth_of_a_window_that_is_small():
    small = SpikeConfig(window=8, minimum_history=4, patience=3)
    assert kinds(lost(decay(200), lambda s: s % 50 in (0, 1), small))[:2] == [*LOST[:2]]
    assert LOST[2] not in kinds(lost(decay(200), lambda s: s % 50 in (0, 1), small))


def test_what_was_counted_is_forgotten_after_a_spike():
    detector, said = SpikeDetector(SpikeConfig()), []
    for record in observed([3.0] * 2000, skipped=lambda s: s % 3 == 0 or 900 < s < 1000):
        said += detector.update(record)
    spikes = [event for event in said if event.kind == "spike"]
    assert len(spikes) > 5
    assert all(now.onset > before.step for before, now in zip(spikes, spikes[1:], strict=False))


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"loss": 3.0, "gradient_norm": math.nan},
        {"loss": math.nan, "gradient_norm": 1.0, "loss_scale": 128.0},
    ],
)
def test_an_update_that_was_made_and_is_not_finite_is_a_spike_at_once(wrong):
    (spike,) = events([*observed([3.0] * 50), Observation(50, **wrong)])
    assert (spike.kind, spike.channel, spike.step, spike.onset) == (*LOST[2], 50, 50)


def test_losses_that_are_not_finite_enter_no_statistics():
    """Between them the detector is where it would be without their steps."""
    losses = raised(decay(1200), 700, 1200, 1.0)
    with_nan, place = [], 0
    for loss in losses:
        with_nan += [math.nan] * (place % 40 == 39 and place < 690) + [loss]
        place = len(with_nan)
    plain = [event for event in of(losses) if event.channel == "fast"]
    said = lost(with_nan, lambda step: math.isnan(with_nan[step]))
    found = [event for event in said if event.channel == "fast"]
    assert [(e.kind, e.loss, e.baseline) for e in found] == [
        (e.kind, e.loss, e.baseline) for e in plain
    ]


def test_updates_that_are_lost_while_the_loss_is_suspected_have_the_suspicion_s_onset():
    losses = raised(decay(1000), 600, 1000, 1.0)
    suspect, _, spike = lost(losses, lambda step: step >= 605)
    assert kinds([suspect, spike]) == [("suspect", "fast"), LOST[2]]
    assert suspect.onset == spike.onset == 600


@pytest.mark.parametrize("wrong", ["loss", "gradient", "scale"])
def test_lost_updates_that_go_on_after_their_spike_are_not_said_again(wrong):
    """A curve that is replayed goes on after a spike."""
    detector, said = SpikeDetector(POLICY), []
    for step, loss in enumerate(decay(1000)):
        bad = step >= 600
        value = math.nan if bad and wrong == "loss" else loss
        exhausted = bad and wrong == "scale"
        said += detector.update(Observation(step, value, skipped=bad, scale_exhausted=exhausted))
    assert [event.kind for event in said].count("spike") == 1


# --- the loss scale of fp16 ----------------------------------------------------------------------


def test_overflows_that_lower_the_loss_scale_are_no_lost_updates():
    skips = observed(
        decay(1000), skipped=lambda step: step in (606, 700), loss_scale=lambda step: 1024.0
    )
    assert events(skips) == []


def test_a_loss_that_is_not_finite_is_none_that_scaling_overflowed():
    said = lost(decay(1000), lambda step: step == 606, loss_scale=lambda step: 1024.0)
    assert kinds(said) == [*LOST[:2]]
    said = lost(decay(1000), lambda step: step >= 606, loss_scale=lambda step: 1024.0)
    assert kinds(said) == [LOST[0], LOST[2]]


def falling(first, minimum=1.0, hysteresis=0):
    """Overflows from a step on: the scale of 8 is halved down to its minimum, and then in vain."""

    def scale(step):
        return max(minimum, 8.0 / 2 ** max(0, step - first))

    def exhausted(step):
        return step >= first and 8.0 / 2 ** (step - first - hysteresis) <= minimum

    return {
        "skipped": lambda step: step >= first,
        "loss_scale": scale,
        "scale_exhausted": exhausted,
    }


@pytest.mark.parametrize("minimum", [1.0, 4.0])
def test_an_overflow_at_the_smallest_loss_scale_is_a_spike_at_once(minimum):
    policy = SpikeConfig()
    (spike,) = events(observed(decay(600), **falling(200, minimum)), policy)
    assert (spike.kind, spike.channel, spike.onset) == ("spike", "loss-scale", 200)
    assert spike.step == (203 if minimum == 1.0 else 201)
    hysteresis = events(observed(decay(600), **falling(200, minimum, hysteresis=1)), policy)
    assert (hysteresis[-1].kind, hysteresis[-1].channel) == ("spike", "loss-scale")
    assert (hysteresis[-1].onset, hysteresis[-1].step) == (200, spike.step + 1)


def test_losses_that_are_not_finite_down_to_the_smallest_scale_have_the_onset_of_the_first():
    losses = decay(600)[:200] + [math.nan] * 400
    suspect, spike = events(observed(losses, **falling(200)), SpikeConfig())
    assert kinds([suspect, spike]) == [LOST[0], ("spike", "loss-scale")]
    assert (spike.onset, spike.step) == (200, 203)


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
    gaps = {**fine, 399: 4.5, 400: None, 499: 4.4}
    assert events(observed(decay(800), **validation(gaps)))[-1] == spike
    creeping = {step: 3.0 + step / 250 for step in range(99, 800, 100)}
    assert events(observed(decay(800), **validation(creeping))) == [], "this is overfitting"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_validation_loss_that_is_not_finite_is_suspected_and_never_a_level(bad):
    def said(**values):
        at = {int(name[1:]): value for name, value in values.items()}
        return [
            (e.kind, e.channel, e.step, e.onset)
            for e in events(observed(decay(600), validation_loss=at.get))
        ]

    suspect = ("suspect", "validation", 199, 100)
    assert said(_99=4.0, _199=bad) == [suspect]
    assert said(_99=4.0, _199=bad, _299=4.1) == [suspect, ("healed", "validation", 299, 100)]
    for last in (bad, 4.6):
        assert said(_99=4.0, _199=bad, _299=last) == [suspect, ("spike", "validation", 299, 100)]
    # An open suspicion is confirmed by it.
    assert said(_99=4.0, _199=4.6, _299=bad)[-1] == ("spike", "validation", 299, 100)
    # As the first of a run; what follows has nothing to be compared with.
    first = ("suspect", "validation", 99, 0)
    assert said(_99=bad) == [first]
    assert said(_99=bad, _199=bad) == [first, ("spike", "validation", 199, 0)]
    assert said(_99=bad, _199=9.0) == [first, ("healed", "validation", 199, 0)]
    assert said(_99=bad, _199=9.0, _299=9.6)[2:] == [("suspect", "validation", 299, 200)]


def test_an_evaluation_before_a_step_whose_loss_is_not_finite_counts():
    records = [Observation(s, 3.0, validation_loss={10: 4.0}.get(s)) for s in range(20)]
    lost_step = Observation(20, math.nan, skipped=True, validation_loss=5.0)
    assert kinds(events([*records, lost_step])) == [LOST[0], ("suspect", "validation")]


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
    """Blips, a level shift, norms, skips, lost updates and evaluations on one curve."""
    draw = random.Random(seed)
    losses = decay(1400, seed)
    for _ in range(4):
        first = draw.randrange(100, 1300)
        losses = raised(losses, first, first + draw.choice([2, 5, 7, 40]), draw.choice([0.5, 1, 4]))
    losses = raised(losses, draw.randrange(200, 1400), 1400, 0.4)
    return [
        Observation(
            step,
            math.nan if lost else loss,
            gradient_norm=draw.lognormvariate(0, 0.3) * (20 if step // 20 % 9 == 5 else 1),
            loss_scale=64.0,
            skipped=lost or draw.random() < (0.8 if step // 30 % 11 == 7 else 0.01),
            validation_loss=draw.choice([loss, loss, math.nan]) if step % 100 == 99 else None,
            scale_exhausted=lost and draw.random() < 0.1,
        )
        for step, loss in enumerate(losses)
        for lost in [draw.random() < (0.3 if step // 25 % 10 == 4 else 0.01)]
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
        again = [folded.update(record) for record in records[cut:]]
        assert repr(again) == repr(straight[cut:])  # NaN is not equal to itself


def test_events_are_plain_numbers():
    import json

    events = of(raised(decay(1000), 600, 1000, 1.0))
    assert [event.kind for event in events][-1] == "spike"
    for event in events:
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
