"""The rollback policy on ledgers: the response to a spike, and the checkpoints to keep."""

import dataclasses

import pytest

from pretrain.config.run import RunConfig
from pretrain.config.sections import ScheduleConfig, SpikeConfig, TrainingConfig
from pretrain.records import ledger
from pretrain.spikes import channels
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.observations import Observation
from pretrain.spikes.policy import (
    GiveUp,
    Rollback,
    answer_to_spike,
    checkpoints_to_keep,
    counted_rollbacks,
    max_checkpoints_kept,
    usual_checkpoints_kept,
)

CONFIG = RunConfig(
    training=TrainingConfig(seed=1, checkpoint_interval=50, checkpoints_kept=4),
    spike=SpikeConfig(margin_steps=20, confirm_steps=15, window=64),
)


def records(*events):
    events = [("segment", {"why": "start", "step": 0, "seed": 1}), *events]
    return [{"number": n, "kind": kind, **fields} for n, (kind, fields) in enumerate(events)]


def commit(step):
    return ("commit", {"step": step})


def spike(onset):
    return ("spike", {"onset": onset, "step": onset + 40, "channel": "fast"})


def as_record(answer, onset):
    return ("segment", {"why": "spike", "onset": onset, **dataclasses.asdict(answer)})


def test_a_spike_is_answered_once_and_climbs_the_ladder_when_it_recurs():
    events = [commit(50), commit(100), spike(130)]
    answers = []
    for _ in range(3):
        answer = answer_to_spike(records(*events), CONFIG)
        assert isinstance(answer, Rollback)
        answers.append(answer)
        events.append(as_record(answer, 130))
        assert answer_to_spike(records(*events), CONFIG) is None
        events.append(spike(130))
    assert [(answer.rung, answer.seed) for answer in answers] == [(1, 2), (2, 3), (3, 4)]
    end = answer_to_spike(records(*events), CONFIG)
    assert isinstance(end, GiveUp)
    fresh = [*events, ("gave-up", {"reason": end.reason})]
    again = answer_to_spike(records(*fresh), CONFIG)
    assert (again.rung, again.seed) == (1, 5), "starting the run again grants new budgets"


def test_budgets_count_rollbacks_since_the_run_was_last_given_up():
    rollbacks = [("segment", {"why": "spike", "step": step}) for step in (1, 2, 3)]
    gave_up = ("gave-up", {})
    kept = records(rollbacks[0], gave_up, rollbacks[1], gave_up, rollbacks[2], commit(4))
    assert [record["step"] for record in counted_rollbacks(kept)] == [3]
    assert counted_rollbacks(kept[:2]) == kept[1:2]


@pytest.mark.parametrize("kind", ["preempted", "done"])
def test_a_checkpoint_of_a_stop_is_kept_while_it_is_one_of_the_newest_two(kind):
    stopped = [commit(50), commit(100), commit(115), (kind, {"step": 115})]
    assert checkpoints_to_keep(records(*stopped), 115, CONFIG) == {50, 100, 115}
    later = [*stopped, commit(150)]
    assert checkpoints_to_keep(records(*later), 150, CONFIG) == {50, 100, 115, 150}
    assert 115 not in checkpoints_to_keep(records(*later, commit(200)), 200, CONFIG)
    # Stops may come faster than regular checkpoints.
    often = [event for n in (13, 26, 39) for event in (commit(n), ("preempted", {"step": n}))]
    assert checkpoints_to_keep(records(*often), 39, CONFIG) == {26, 39}
    regular = [commit(50), commit(100), (kind, {"step": 100}), commit(150), commit(200)]
    assert checkpoints_to_keep(records(*regular), 200, CONFIG) == {50, 100, 150, 200}


def test_the_targets_of_an_open_suspicion_are_kept_however_old_it_is():
    events = [commit(step) for step in range(50, 6001, 50)]
    suspected = [*events, ("suspect", {"onset": 390, "step": 420, "channel": "validation"})]
    assert 350 not in checkpoints_to_keep(records(*events), 6000, CONFIG)
    assert {250, 300, 350} <= checkpoints_to_keep(records(*suspected), 6000, CONFIG)


def test_the_newest_checkpoints_are_kept_as_the_recipe_says():
    config = dataclasses.replace(CONFIG, training=TrainingConfig(checkpoints_kept=20))
    events = [commit(step) for step in range(50, 6001, 50)]
    kept = checkpoints_to_keep(records(*events), 6000, config)
    assert {*range(5050, 6001, 50)} <= kept
    assert len(kept) <= max_checkpoints_kept(config)


@pytest.mark.parametrize("interval", [7, 50, 400])
@pytest.mark.parametrize("steps", [30, 345, 5000])
def test_the_usual_number_of_checkpoints_is_what_a_run_without_a_spike_keeps(interval, steps):
    kept = {"checkpoint_interval": interval, "checkpoints_kept": 20}
    training = dataclasses.replace(CONFIG.training, steps=steps, **kept)
    schedule = ScheduleConfig(warmup_steps=10)
    config = dataclasses.replace(CONFIG, training=training, schedule=schedule)
    events, most = [], 0
    for step in [*range(interval, steps, interval), steps]:
        events.append(commit(step))
        keep = checkpoints_to_keep(records(*events), step, config)
        saved = ledger.run_state(records(*events)).checkpoints
        events = [commit(old) for old in saved if old in keep]
        most = max(most, len(keep))
    assert most <= usual_checkpoints_kept(config) <= len(keep) + 1
    assert most <= max_checkpoints_kept(config)


def test_the_checkpoints_of_a_run_without_end_are_counted_at_once():
    training = dataclasses.replace(CONFIG.training, steps=10**12)
    config = dataclasses.replace(CONFIG, training=training)
    assert 4 <= usual_checkpoints_kept(config) <= max_checkpoints_kept(config)


def test_a_longer_interval_does_not_make_a_deleted_checkpoint_a_target():
    """Law 5: the next checkpoint after step 2000 would be that of step 2500."""
    events = [commit(step) for step in range(50, 2001, 50)]
    keep = checkpoints_to_keep(records(*events), 2000, CONFIG)
    for onset in (2490, 2000, 2000):
        answer = answer_to_spike(records(*events, spike(onset)), CONFIG)
        assert answer.step in keep
        events += [spike(onset), as_record(answer, onset)]


def test_a_checkpoint_from_before_every_rise_that_adds_up_is_kept():
    """A spike may begin with a small rise thousands of steps before."""
    events = []
    for step in range(50, 30_001, 50):
        events.append(commit(step))
        saved = ledger.run_state(records(*events)).checkpoints
        if step % 500 == 0:
            keep = checkpoints_to_keep(records(*events), step, CONFIG)
            events = [commit(each) for each in saved if each in keep]
            for onset in range(max(1100, step - channels.MEMORY), step, 700):
                answer = answer_to_spike(records(*events, spike(onset)), CONFIG)
                assert onset - 4600 <= answer.step <= onset - CONFIG.spike.margin_steps


@pytest.mark.parametrize("period", [2, 5, 9])
def test_retention_keeps_the_target_of_a_spike_found_over_the_whole_window(period):
    """Skipped updates heal one by one; the onset of the spike lies before healed suspicions."""
    config = dataclasses.replace(CONFIG, spike=dataclasses.replace(CONFIG.spike, margin_steps=0))
    detector, events, everything = SpikeDetector(config.spike), [], []
    for step in range(600):
        skipped = step >= 300 and step % period == 0
        for event in detector.update(Observation(step, 3.0, skipped=skipped)):
            events.append((event.kind, dataclasses.asdict(event)))
        if events and events[-1][0] == "spike":
            break
        if (step + 1) % 3 == 0:
            events.append(commit(step + 1))
            everything.append(step + 1)
            keep = checkpoints_to_keep(records(*events), step + 1, config)
            saved = ledger.run_state(records(*events)).checkpoints
            events += [("delete", {"step": s}) for s in saved if s not in keep]
    spike = events[-1][1]
    assert (spike["channel"], spike["onset"]) == ("non-finite", -(-300 // period) * period)
    answer = answer_to_spike(records(*events), config)
    assert answer.step == max(s for s in everything if s <= spike["onset"])
