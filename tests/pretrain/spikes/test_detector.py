"""The spike detector on lists of losses: suspicions, confirmations, onsets, and false alarms."""

import math
import random
import statistics

import pytest

from pretrain.config.sections import SpikeConfig
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.observations import Evaluation, Observation, in_order
from pretrain.spikes.statistics import TOLERANCE, SortedWindow, change_point
from tests.benchmarks.spikes import SPIKES, curve, detections

POLICY = SpikeConfig(window=128, patience=4, confirm_steps=10, margin_steps=20)


def decay(steps, seed=1, noise=0.05):
    """A loss that decays from 8 nats to 3, with noise."""
    draw = random.Random(seed)
    return [3.0 + 5.0 * math.exp(-step / 200) + draw.gauss(0.0, noise) for step in range(steps)]


def raised(losses, first, last, rise):
    return [loss + (rise if first <= step < last else 0.0) for step, loss in enumerate(losses)]


def observed(losses, **channels):
    """Records of losses; each channel is a function of the step, where None means the default."""
    for step, loss in enumerate(losses):
        given = {name: value(step) for name, value in channels.items()}
        yield Observation(step, loss, **{k: v for k, v in given.items() if v is not None})


def events(records, policy=POLICY, changes=()):
    """Events until the first spike, where the loop would stop."""
    detector, found = SpikeDetector(policy, changes), []
    for record in records:
        found += detector.update(record)
        if found and found[-1].kind == "spike":
            break
    return found


def of(losses, policy=POLICY, changes=()):
    return events(observed(losses), policy, changes)


def kinds(found):
    return [(event.kind, event.channel) for event in found]


@pytest.mark.parametrize("seed", range(10))
def test_a_clean_noisy_decay_causes_no_event(seed):
    assert of(decay(3000, seed), SpikeConfig()) == []
    assert of(decay(3000, seed, noise=0.3), SpikeConfig()) == []


@pytest.mark.parametrize("seed", range(6))
def test_a_clean_power_law_with_heavy_tails_causes_no_event(seed):
    assert detections(curve("clean", seed, 4000).losses) == []


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
        found = detections(labelled.losses)
        spike = next(event for event in found if event.kind == "spike")
        suspect = next((event for event in found if event.onset == spike.onset), spike)
        assert suspect.step <= labelled.onset + (200 if kind == "divergence" else 50)
        dated.append(abs(spike.onset - labelled.onset))
    assert sorted(dated)[1] <= (50 if kind == "divergence" else 10), dated


@pytest.mark.parametrize("seed", range(6))
def test_a_level_shift_on_a_falling_loss_is_found(seed):
    """At record 700 the clean loss still falls by a third of the shift within 100 records."""
    losses = curve("clean", 2 * seed + 1, 1200).losses.copy()
    losses[700:] += 0.3
    spike = detections(losses)[-1]
    assert spike.kind == "spike"
    assert abs(spike.onset - 700) <= 10


@pytest.mark.parametrize("seed", range(10))
def test_a_blip_heals(seed):
    found = of(raised(decay(1200, seed), 500, 507, 1.0))
    assert kinds(found) == [("suspect", "fast"), ("healed", "fast")]
    assert found[1].onset == 500
    assert found[1].step <= 500 + 7 + POLICY.patience


@pytest.mark.parametrize("seed", range(12))
def test_labelled_blips_cause_no_spike(seed):
    assert "spike" not in {event.kind for event in detections(curve("blip", seed, 3000).losses)}


def test_a_rise_after_a_healed_one_has_its_own_onset():
    found = of(raised(raised(decay(1200), 500, 507, 1.0), 600, 1200, 1.0))
    assert [event.kind for event in found] == ["suspect", "healed", "suspect", "spike"]
    assert found[-1].onset == 600


def test_outliers_do_not_widen_the_statistics():
    """If outliers entered the window, the last rise would not be found."""
    losses = decay(1200)
    for first in range(400, 1000, 6):  # a third of all losses, never `patience` of the last six
        losses = raised(losses, first, first + 2, 4.0)
    found = of(raised(losses, 1003, 1200, 0.8))
    assert found[-1].kind == "spike"
    assert found[-1].onset in range(1000, 1004)


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rise_heals_where_it_returns_and_is_a_spike_where_it_becomes_fast(seed):
    returning = raised(decay(2000, seed), 1000, 1100, 0.2)
    fast = raised(returning, 1100, 2000, 1.0)
    for losses, end, steps in (returning, "healed", 32), (fast, "spike", 60):
        found = of(losses, SpikeConfig())
        assert kinds(found) == [("suspect", "slow"), (end, "slow")]
        assert abs(found[0].onset - 1000) <= 5
        assert found[1].step <= 1100 + steps


# --- new levels ----------------------------------------------------------------------------------

NEW_LEVEL = [("suspect", "slow"), ("new-level", "slow")]


def ramp(losses, first, length, height):
    """The losses, which rise to a height within some steps and stay there."""
    after = [min(1.0, max(0, step - first) / length) for step in range(len(losses))]
    return [loss + height * share for loss, share in zip(losses, after, strict=True)]


@pytest.mark.parametrize("length", [10, 100, 400])
@pytest.mark.parametrize("seed", range(3))
def test_a_small_rise_that_stays_is_a_new_level(seed, length):
    suspect, told = of(ramp(decay(3000, seed, 0.03), 1200, length, 0.14), SpikeConfig())
    assert kinds([suspect, told]) == NEW_LEVEL
    assert told.onset == suspect.onset
    assert 1150 <= told.onset <= 1200 + length
    assert told.loss - told.baseline == pytest.approx(0.14, abs=0.05)
    assert 1600 <= told.step <= 1200 + length + 500


@pytest.mark.parametrize("seed", range(3))
def test_after_a_new_level_rises_are_judged_by_it(seed):
    losses = raised(decay(3000, seed), 1200, 3000, 0.14)
    *_, level, suspect, spike = of(raised(losses, 1800, 3000, 0.8), SpikeConfig())
    assert kinds([suspect, spike]) == [("suspect", "fast"), ("spike", "fast")]
    assert (suspect.onset, spike.step) == (1800, 1850)
    assert suspect.baseline == pytest.approx(3.14, abs=0.05)
    assert (spike.onset, spike.baseline) == (level.onset, level.baseline), "of the first rise"


@pytest.mark.parametrize("doubling", [50, 100, 200, 300])
def test_a_small_rise_that_goes_on_rising_is_a_spike(doubling):
    losses = ramp(decay(3000, noise=0.03), 1200, 50, 0.1)
    for step in range(1250, 3000):
        losses[step] += 0.1 * (2 ** min(9, (step - 1250) / doubling) - 1)
    suspect, spike = of(losses, SpikeConfig())
    assert (spike.kind, spike.onset) == ("spike", suspect.onset)
    assert abs(spike.onset - 1210) <= 40
    assert spike.step <= 1250 + 3 * doubling + 100, "it is told before it has risen eightfold"


def test_small_rises_add_up_unless_the_run_has_regained_them():
    stairs = raised(raised(decay(4000, noise=0.03), 1200, 4000, 0.12), 2000, 4000, 0.12)
    assert kinds(of(stairs, SpikeConfig()))[1:] == [NEW_LEVEL[1], NEW_LEVEL[0], ("spike", "slow")]
    assert of(stairs, SpikeConfig())[-1].onset == pytest.approx(1200, abs=10)
    regained = raised(raised(decay(4000, noise=0.03), 1200, 1700, 0.12), 2400, 4000, 0.12)
    regained = raised(regained, 3200, 4000, 0.8)
    *levels, _, spike = of(regained, SpikeConfig())
    assert kinds(levels) == 2 * NEW_LEVEL
    assert spike.onset == pytest.approx(2400, abs=10)


def test_a_spike_long_after_a_new_level_begins_where_it_rises():
    losses = raised(raised(decay(11_000), 1200, 11_000, 0.14), 10_500, 11_000, 0.8)
    assert of(losses, SpikeConfig())[-1].onset == 10_500
    (*_, last) = of(losses[:9000] + losses[10_500:], SpikeConfig())
    assert last.onset == pytest.approx(1200, abs=9)


# --- drift ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "length"), [(0.24, 5000), (0.4, 5000)])
def test_a_slow_rise_is_suspected_once_it_is_above_the_largest_new_level(height, length):
    losses = ramp(decay(1500 + length, noise=0.03), 1500, length, height)
    (suspect,) = (event for event in of(losses, SpikeConfig()) if event.channel == "drift")
    assert suspect.kind == "suspect"
    assert 1300 <= suspect.onset <= 1500 + 0.03 / height * length
    assert suspect.step <= 1500 + 0.2 / height * length + 4 * 256
    assert suspect.loss - suspect.baseline == pytest.approx(0.21, abs=0.02)
    spike = of([*losses, *(loss + 1 for loss in losses[-60:])], SpikeConfig())[-1]
    assert (spike.kind, spike.onset, spike.baseline) == ("spike", suspect.onset, suspect.baseline)


def test_a_slow_rise_that_returns_heals_and_noise_or_a_declared_change_is_none():
    hill = ramp(ramp(decay(7000, noise=0.03), 1500, 4000, 0.26), 6000, 500, -0.26)
    suspect, healed = of(hill, SpikeConfig())
    assert kinds([suspect, healed]) == [("suspect", "drift"), ("healed", "drift")]
    assert suspect.onset == healed.onset
    assert of(hill, SpikeConfig(), changes=[3500, 5800]) == []
    noisy = decay(9000, noise=1.0)
    assert of([each + 0.2 * (step > 5000) for step, each in enumerate(noisy)], SpikeConfig()) == []


def test_a_small_rise_that_returns_while_it_is_judged_heals():
    losses = raised(decay(3000), 1200, 1500, 0.14)
    assert kinds(of(losses, SpikeConfig())) == [NEW_LEVEL[0], ("healed", "slow")]


@pytest.mark.parametrize("first", range(1400, 1600, 20))
def test_a_blip_while_a_small_rise_is_judged_is_no_spike(first):
    losses = raised(raised(decay(3000), 1200, 3000, 0.14), first, first + 20, 1.0)
    assert kinds(of(losses, SpikeConfig())) == NEW_LEVEL


def test_a_raised_gradient_norm_puts_a_new_level_off():
    losses = raised(decay(3000), 1200, 3000, 0.14)
    norms = {"gradient_norm": lambda step: 30.0 if step >= 1550 else 1.0 + step % 7 / 70}
    found = events(observed(losses, **norms), SpikeConfig())
    assert kinds(found)[-2:] == [("healed", "gradient-norm"), NEW_LEVEL[1]]
    assert found[-1].step > 1750


def test_a_gross_rise_is_confirmed_at_once():
    (spike,) = of(raised(decay(1000), 600, 1000, 3.5))
    assert spike.kind == "spike"
    assert (spike.onset, spike.step) == (600, 600 + POLICY.patience - 1)


def test_a_non_finite_loss_during_a_suspicion_has_the_onset_of_the_suspicion():
    losses = raised(decay(1000), 600, 1000, 1.0)
    losses[606] = math.nan
    suspect, spike = of(losses)
    assert suspect.onset == spike.onset == 600
    assert spike.step == 606


# --- non-finite updates --------------------------------------------------------------------------

NON_FINITE = ("suspect", "non-finite"), ("healed", "non-finite"), ("spike", "non-finite")


def skipped(steps, wrong, policy=POLICY, what="loss", **channels):
    """Events where the updates of some steps were skipped because of a NaN loss or gradient."""
    losses = [math.nan if what == "loss" and wrong(s) else loss for s, loss in enumerate(steps)]
    return events(observed(losses, skipped=wrong, **channels), policy)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_one_skipped_update_is_suspected_at_once_and_heals(what):
    suspect, healed = skipped(decay(1000), lambda step: step == 600, what=what)
    assert kinds([suspect, healed]) == [*NON_FINITE[:2]]
    assert suspect.onset == healed.onset == suspect.step == 600
    assert healed.step == 600 + POLICY.patience + TOLERANCE
    assert suspect.baseline == pytest.approx(3.0 + 5.0 * math.exp(-3), abs=0.1)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("first", [0, 5, 600])
def test_updates_that_are_skipped_without_end_are_a_spike_after_six(first, what):
    suspect, spike = skipped(decay(1000), lambda step: step >= first, SpikeConfig(), what)
    assert kinds([suspect, spike]) == [NON_FINITE[0], NON_FINITE[2]]
    assert (suspect.step, spike.step, spike.onset) == (first, first + 5, first)


@pytest.mark.parametrize("period", range(2, 10))
def test_frequently_skipped_updates_are_a_spike(period):
    """They are counted over the whole window, even if each one heals before the next."""
    found = skipped(decay(4000), lambda s: s >= 600 and s % period == 0, SpikeConfig())
    spike, first = found[-1], -(-600 // period) * period
    assert (spike.kind, spike.channel) == NON_FINITE[2]
    assert spike.onset == first
    assert spike.step <= first + 26 * period
    assert (NON_FINITE[1] in kinds(found)) == (period == 9)


def test_the_onset_of_groups_of_skipped_updates_lies_in_the_window():
    """Three in 40 are less than a tenth and heal in between; five in 40 are a spike."""
    found = skipped(decay(4000), lambda s: s % 40 < (3 if s < 1200 else 5), SpikeConfig())
    *before, spike = found
    assert {*kinds(before)} == {*NON_FINITE[:2]}
    assert (spike.kind, spike.channel) == NON_FINITE[2]
    assert spike.step >= 1200
    assert spike.onset == next(s for s in range(spike.step - 255, 1200) if s % 40 < 3)


def test_in_a_small_window_a_few_skipped_updates_are_not_a_spike():
    small = SpikeConfig(window=8, patience=3)
    assert kinds(skipped(decay(200), lambda s: s % 50 in (0, 1), small))[:2] == [*NON_FINITE[:2]]
    assert NON_FINITE[2] not in kinds(skipped(decay(200), lambda s: s % 50 in (0, 1), small))


def test_counts_start_again_after_a_spike():
    detector, found = SpikeDetector(SpikeConfig()), []
    for record in observed([3.0] * 2000, skipped=lambda s: s % 3 == 0 or 900 < s < 1000):
        found += detector.update(record)
    spikes = [event for event in found if event.kind == "spike"]
    assert len(spikes) > 5
    assert all(now.onset > before.step for before, now in zip(spikes, spikes[1:], strict=False))


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"loss": -math.inf},
        {"loss": 3.0, "gradient_norm": math.nan},
        {"loss": math.nan, "gradient_norm": 1.0, "loss_scale": 128.0},
    ],
)
@pytest.mark.parametrize("step", [0, 50])
def test_an_applied_non_finite_update_is_a_spike_at_once(step, wrong):
    (spike,) = events([*observed([3.0] * step), Observation(step, **wrong)])
    assert (spike.kind, spike.channel, spike.step, spike.onset) == (*NON_FINITE[2], step, step)
    assert repr(spike.loss) == repr(wrong["loss"])


def test_non_finite_losses_do_not_enter_the_statistics():
    """The events of the loss are those of the curve without these records."""
    losses = raised(decay(1200), 700, 1200, 1.0)
    with_nan, place = [], 0
    for loss in losses:
        with_nan += [math.nan] * (place % 40 == 39 and place < 690) + [loss]
        place = len(with_nan)
    plain = [event for event in of(losses) if event.channel == "fast"]
    found = skipped(with_nan, lambda step: math.isnan(with_nan[step]))
    found = [event for event in found if event.channel == "fast"]
    assert [(e.kind, e.loss, e.baseline) for e in found] == [
        (e.kind, e.loss, e.baseline) for e in plain
    ]


def test_skipped_updates_during_a_suspicion_of_the_loss_have_its_onset():
    losses = raised(decay(1000), 600, 1000, 1.0)
    suspect, _, spike = skipped(losses, lambda step: step >= 605)
    assert kinds([suspect, spike]) == [("suspect", "fast"), NON_FINITE[2]]
    assert suspect.onset == spike.onset == 600


@pytest.mark.parametrize("wrong", ["loss", "applied loss", "gradient", "scale"])
def test_a_spike_that_continues_is_reported_once(wrong):
    """A replayed curve continues after its spike."""
    detector, found = SpikeDetector(POLICY), []
    for step, loss in enumerate(decay(1000)):
        bad = step >= 600
        value = math.nan if bad and "loss" in wrong else loss
        skipped, exhausted = bad and wrong != "applied loss", bad and wrong == "scale"
        seen = Observation(step, value, skipped=skipped, scale_exhausted=exhausted)
        found += detector.update(seen)
    assert [event.kind for event in found].count("spike") == 1


# --- the loss scale of fp16 ----------------------------------------------------------------------


def falling(first, minimum=1.0, hysteresis=0):
    """Overflows from a step on: the scale is halved from 8 to its minimum and stays there."""

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


def test_a_spike_at_the_smallest_scale_has_the_onset_of_the_first_non_finite_loss():
    losses = decay(600)[:200] + [math.nan] * 400
    suspect, spike = events(observed(losses, **falling(200)), SpikeConfig())
    assert kinds([suspect, spike]) == [NON_FINITE[0], ("spike", "loss-scale")]
    assert (spike.onset, spike.step) == (200, 203)


@pytest.mark.parametrize("before", [1, 5, 20])
def test_without_a_history_only_a_gross_rise_is_a_spike(before):
    assert of([8.0] * before + [10.0] * 11) == []
    (spike,) = of([8.0] * before + [12.0] * 11)
    assert (spike.kind, spike.channel, spike.onset) == ("spike", "fast", before)


def test_on_a_constant_loss_rounding_is_not_an_outlier():
    assert of([3.0] * 200 + [3.0 + 1e-4] * 200) == []


def test_a_raised_gradient_norm_is_suspected_and_never_confirmed():
    norms = {"gradient_norm": lambda step: 30.0 if step >= 500 else 1.0 + step % 7 / 70}
    found = events(observed(decay(1500), **norms))
    assert kinds(found) == [("suspect", "gradient-norm"), ("healed", "gradient-norm")]
    assert found[0].onset == 500
    assert found[1].step - found[0].step == POLICY.slow_confirm_steps


def test_a_raised_gradient_norm_keeps_a_suspicion_of_the_loss_open():
    losses = raised(decay(1500), 500, 507, 1.0)
    norms = {"gradient_norm": lambda step: 30.0 if 500 <= step < 530 else 1.0 + step % 7 / 70}
    found = events(observed(losses, **norms))
    assert {event.kind for event in found} == {"suspect", "healed"}
    assert next(e.step for e in found if kinds([e]) == [("healed", "fast")]) >= 530


def test_a_suspicion_kept_open_by_the_gradient_norm_is_not_confirmed_by_a_blip():
    losses = raised(raised(decay(1500), 500, 507, 1.0), 520, 527, 1.0)
    norms = {"gradient_norm": lambda step: 30.0 if 500 <= step < 535 else 1.0 + step % 7 / 70}
    assert {event.kind for event in events(observed(losses, **norms))} == {"suspect", "healed"}


@pytest.mark.parametrize("window", [1, 2, 5])
def test_windows_of_a_few_records_work(window):
    policy = SpikeConfig(window=window, patience=1)
    assert of([3.0] * 50 + [9.0] * 50, policy)[-1].kind == "spike"


def test_overflows_that_the_loss_scale_answers_cause_no_event():
    seen = observed(decay(600), skipped=lambda s: s % 3 == 0, loss_scale=lambda s: 8.0)
    assert events(seen) == []


def test_a_loss_scale_that_keeps_falling_is_a_spike_and_one_that_settles_heals():
    settles = observed(decay(600), skipped=lambda s: 200 <= s < 208, loss_scale=lambda s: 8.0)
    assert kinds(events(settles)) == [("suspect", "loss-scale"), ("healed", "loss-scale")]
    falls = observed(decay(600), skipped=lambda s: s >= 200, loss_scale=lambda s: 8.0)
    suspect, spike = events(falls)
    assert (spike.channel, spike.onset, suspect.step) == ("loss-scale", 200, 203)
    assert spike.step - suspect.step == POLICY.confirm_steps


def evaluated(values, steps=800):
    """Events of a calm curve with evaluations: {updates: loss, or several (loss, id)}."""
    losses = {n: given if isinstance(given, list) else [(given, "")] for n, given in values.items()}
    evaluations = [Evaluation(n, *each) for n, several in losses.items() for each in several]
    return events(in_order(observed(decay(steps)), evaluations))


def test_a_jump_of_the_validation_loss_is_confirmed_by_the_next_evaluation():
    fine = {100: 4.0, 200: 3.8, 300: 3.85}
    assert evaluated(fine) == []
    healed = evaluated({**fine, 400: 4.5, 500: 3.7})
    assert kinds(healed) == [("suspect", "validation"), ("healed", "validation")]
    suspect, spike = evaluated({**fine, 400: 4.5, 500: 4.4})
    assert (spike.kind, spike.channel, spike.step) == ("spike", "validation", 499)
    assert suspect.onset == spike.onset == 300, "the first step after the last good evaluation"
    assert (spike.loss, spike.baseline) == (4.4, 3.85)
    creeping = {step: 3.0 + step / 250 for step in range(100, 801, 100)}
    assert evaluated(creeping) == [], "this is overfitting"


def test_evaluations_of_other_measures_are_not_compared():
    """At a boundary the same weights are measured in both ways."""
    fine = {300: [(3.85, "a")]}
    jump = {**fine, 400: [(3.8, "a"), (4.5, "b")], 500: [(4.4, "b")]}
    assert evaluated(jump) == []
    assert kinds(evaluated({**jump, 600: [(5.0, "b")]})) == [("suspect", "validation")]
    # The same weights have risen in the new kind as well: its level from before is inferred.
    risen = {**fine, 400: [(4.5, "a"), (6.0, "b")]}
    assert kinds(evaluated(risen)) == [("suspect", "validation")]
    assert kinds(evaluated({**risen, 500: [(5.4, "b")]}))[-1] == ("healed", "validation")
    spike = evaluated({**risen, 500: [(5.9, "b")]})[-1]
    assert (spike.kind, spike.onset) == ("spike", 300)
    # Nothing of the new kind is known yet after one that is not finite.
    broken = {**fine, 400: [(3.8, "a"), (math.nan, "b")], 500: [(9.0, "b")]}
    assert kinds(evaluated(broken))[-1] == ("healed", "validation")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_validation_loss_is_suspected_and_never_a_baseline(bad):
    def found(**values):
        at = {int(name[1:]): value for name, value in values.items()}
        found = evaluated({step + 1: value for step, value in at.items()}, 600)
        return [(e.kind, e.channel, e.step, e.onset) for e in found]

    suspect = ("suspect", "validation", 199, 100)
    assert found(_99=4.0, _199=bad) == [suspect]
    assert found(_99=4.0, _199=bad, _299=4.1) == [suspect, ("healed", "validation", 299, 100)]
    for last in (bad, 4.6):
        assert found(_99=4.0, _199=bad, _299=last) == [suspect, ("spike", "validation", 299, 100)]
    # It confirms an open suspicion.
    assert found(_99=4.0, _199=4.6, _299=bad)[-1] == ("spike", "validation", 299, 100)
    # If it is the first of a run, there is nothing to compare the next one with.
    first = ("suspect", "validation", 99, 0)
    assert found(_99=bad) == [first]
    assert found(_99=bad, _199=bad) == [first, ("spike", "validation", 199, 0)]
    assert found(_99=bad, _199=9.0) == [first, ("healed", "validation", 199, 0)]
    assert found(_99=bad, _199=9.0, _299=9.6)[2:] == [("suspect", "validation", 299, 200)]


def test_an_evaluation_before_a_step_with_a_non_finite_loss_counts():
    steps = [*(Observation(s, 3.0) for s in range(20)), Observation(20, math.nan, skipped=True)]
    seen = in_order(steps, [Evaluation(10, 4.0), Evaluation(20, 5.0)])
    assert kinds(events(seen)) == [("suspect", "validation"), NON_FINITE[0]]


def test_a_rise_at_a_declared_change_causes_no_event():
    losses = raised(decay(1500), 800, 1500, 0.8)
    assert kinds(of(losses))[-1] == ("spike", "fast")
    assert of(losses, changes=[800]) == []
    assert of(losses, changes=[400, 800, 1200]) == []


def test_after_a_declared_change_gross_rises_are_found_at_once_and_others_later():
    gross = of(raised(decay(1500), 810, 1500, 4.0), changes=[800])
    assert (gross[-1].kind, gross[-1].onset) == ("spike", 810)
    later = of(raised(decay(1500), 816, 1500, 0.8), SpikeConfig(), changes=[800])
    assert (later[-1].kind, later[-1].onset) == ("spike", 816)


def test_a_suspicion_that_is_open_at_a_declared_change_is_judged_first():
    found = of(raised(decay(1500), 795, 1500, 1.0), changes=[800])
    assert (found[-1].kind, found[-1].onset) == ("spike", 795)


def test_thresholds_count_records_not_steps():
    """The curve is logged every 5 steps."""
    losses = raised(decay(1200), 600, 1200, 1.0)
    suspect, spike = events(Observation(5 * step, loss) for step, loss in enumerate(losses))
    assert suspect.onset == spike.onset == 3000
    assert spike.step == 5 * (600 + POLICY.confirm_steps)


def records_with_every_event(seed):
    """A curve with blips, a level shift, raised norms, skipped updates and evaluations."""
    draw = random.Random(seed)
    losses = decay(1400, seed)
    for _ in range(4):
        first = draw.randrange(100, 1300)
        losses = raised(losses, first, first + draw.choice([2, 5, 7, 40]), draw.choice([0.5, 1, 4]))
    losses = raised(losses, draw.randrange(200, 1400), 1400, 0.4)
    steps = [
        Observation(
            step,
            math.nan if lost else loss,
            gradient_norm=draw.lognormvariate(0, 0.3) * (20 if step // 20 % 9 == 5 else 1),
            loss_scale=64.0,
            skipped=lost or draw.random() < (0.8 if step // 30 % 11 == 7 else 0.01),
            scale_exhausted=lost and draw.random() < 0.1,
        )
        for step, loss in enumerate(losses)
        for lost in [draw.random() < (0.3 if step // 25 % 10 == 4 else 0.01)]
    ]
    evaluations = [
        Evaluation(n, draw.choice([losses[n], losses[n], math.nan]), draw.choice("ab"))
        for n in range(100, 1400, 100)
    ]
    return in_order(steps, evaluations)


def continues_alike(records, policy, changes, cuts):
    """Kinds of events; a detector fed with the records before a cut gives the same after it."""
    live = SpikeDetector(policy, changes)
    straight = [live.update(record) for record in records]
    for cut in cuts:
        folded = SpikeDetector(policy, changes)
        for record in records[:cut]:
            folded.update(record)
        again = [folded.update(record) for record in records[cut:]]
        assert repr(again) == repr(straight[cut:])  # NaN is not equal to itself
    return {event.kind for found in straight for event in found}


@pytest.mark.parametrize("seed", range(12))
def test_a_detector_fed_with_the_history_continues_alike(seed):
    """Law 6: at any record, a new detector fed with the records before gives the same events."""
    cuts = random.Random(seed).sample(range(1400), 3)
    found = continues_alike(records_with_every_event(seed), POLICY, [300, 900], cuts)
    assert found >= {"suspect", "healed"}


def test_a_detector_fed_with_a_new_level_continues_alike():
    stairs = raised(raised(decay(2400, noise=0.03), 1200, 2400, 0.12), 1900, 2400, 0.12)
    found = continues_alike([*observed(stairs)], SpikeConfig(), [], [1210, 1590, 1650, 2000])
    assert found == {"suspect", "new-level", "spike"}
    drift = raised(ramp(decay(5600, noise=0.03), 1000, 4000, 0.26), 5500, 5600, 1.0)
    found = continues_alike([*observed(drift)], SpikeConfig(), [], [2000, 5510])
    assert found == {"suspect", "spike"}


def test_a_window_has_the_median_of_its_last_values():
    draw, window, values = random.Random(1), SortedWindow(40), []
    for _ in range(100):
        values.append(draw.gauss(0, 1))
        window.append(values[-1])
        assert window.median() == pytest.approx(statistics.median(values[-40:]))


def test_deviations_say_how_the_next_record_is_judged_and_change_nothing():
    losses = decay(400)
    asked, plain = SpikeDetector(POLICY), SpikeDetector(POLICY)
    records = list(observed(raised(losses, 380, 400, 2.0), gradient_norm=lambda step: 1.0))
    found = []
    for record in records:
        found.append([*asked.deviations(record).values()])
        assert asked.update(record) == plain.update(record)
    assert all(math.isnan(each) for pair in found[: POLICY.slow_window] for each in pair)
    usual, spike = found[100:380], found[380:]
    assert max(loss for loss, _ in usual) < POLICY.deviations < min(loss for loss, _ in spike)
    assert {norm for _, norm in usual} == {0.0}
    bad = Observation(400, math.nan, math.inf)
    assert all(map(math.isnan, asked.deviations(bad).values()))


def test_one_low_value_does_not_date_a_rise_after_it():
    assert change_point([0.0, 0.0, *[3.0] * 6, -100.0, *[3.0] * 3], height=2.0) == 2
