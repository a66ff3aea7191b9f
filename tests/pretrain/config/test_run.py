"""Records of a recipe: refused combinations, and numbers that follow from others."""

import dataclasses

import pytest

from pretrain.config.run import RunConfig
from pretrain.config.sections import BatchConfig, ScheduleConfig, SpikeConfig, TrainingConfig
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.observations import Observation


def test_accumulation_follows_from_batch_and_ranks():
    assert BatchConfig(32, 4).accumulation_steps(2) == 4
    assert BatchConfig(32, 4).accumulation_steps(3) == 3
    for ranks, size in ((9, 2), (16, 2), (17, 1)):
        with pytest.raises(ValueError, match=rf"4 x {ranks} ranks; set .*_size={size}$"):
            BatchConfig(32, 4).accumulation_steps(ranks)
    with pytest.raises(ValueError, match="32 is less than .* 4 x 33 ranks$"):
        BatchConfig(32, 4).accumulation_steps(33)


@pytest.mark.parametrize("steps", [1, 5, 150])
def test_a_trial_that_ends_before_a_spike_could_be_confirmed_is_only_warned(steps):
    training = TrainingConfig(steps=steps, checkpoint_interval=1, checkpoints_kept=2)
    config = RunConfig(training=training, schedule=ScheduleConfig(warmup_steps=0))
    assert "spike.margin_steps" in config.short_reach
    with pytest.raises(ValueError, match="spike.margin_steps"):
        dataclasses.replace(config, training=dataclasses.replace(training, steps=151))


@pytest.mark.parametrize("margin", [0, 5, 20])
@pytest.mark.parametrize(("interval", "kept"), [(5, 3), (10, 2), (7, 9), (25, 2), (40, 3)])
@pytest.mark.parametrize(
    ("patience", "confirm", "gross"), [(6, 50, 3.0), (4, 10, 1.5), (8, 1, 99.0), (2, 30, 99.0)]
)
def test_kept_checkpoints_reach_back_before_any_spike_or_the_recipe_is_refused(
    patience, confirm, gross, interval, kept, margin
):
    """Law 5: the retention rule, tried against a sudden, a confirmed and a wavering rise.

    Exactly those recipes are refused whose checkpoints reach back less far than the longest alarm.
    """
    training = TrainingConfig(checkpoint_interval=interval, checkpoints_kept=kept)
    spike = SpikeConfig(
        window=512, patience=patience, confirm_steps=confirm, gross_nats=gross, margin_steps=margin
    )
    if (kept - 1) * interval < margin + max(confirm, patience + 1):
        with pytest.raises(ValueError, match="no checkpoint from before it would be left"):
            RunConfig(training=training, spike=spike)
        return
    assert RunConfig(training=training, spike=spike).spike == spike
    for rise in (1.0, 10.0):
        for first in range(200, 200 + interval, max(1, interval // 5)):
            onset, alarm = spike_of(spike, first, rise)
            saved = range(interval, alarm + 1, interval)[-kept:]
            assert min(saved) <= onset - margin, (rise, first)


def spike_of(policy, first, rise):
    """Onset and alarm of a loss that rises for good at `first`, with two calm values soon after."""
    detector = SpikeDetector(policy)
    for step in range(10_000):
        calm = step < first or step - first in (1, 2)
        events = detector.update(Observation(step, 2.0 if calm else 2.0 + rise))
        if events and events[-1].kind == "spike":
            return events[-1].onset, step
    raise AssertionError("no spike")
