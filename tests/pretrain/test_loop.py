"""The order of events in a step, with an engine that only records its calls."""

import dataclasses

import pytest

from pretrain.loop import (
    GO_ON,
    Hook,
    MicroBatch,
    StepRecord,
    StepResult,
    TermLoss,
    run,
    weighted_loss,
)


class Recorder:
    """Engine, batches and hooks that record their calls, in order."""

    rank, world_size = 0, 2

    def __init__(self, rank=0, verdict=GO_ON):
        self.rank, self.verdict, self.events = rank, verdict, []

    def micro_batches(self, step, rank, ranks):
        self.events.append(("batch", step, rank, ranks))
        return [MicroBatch(step, {}, 64, (10,), batch_digest=f"blocks of {step}")]

    def seed(self, step):
        return 100 + step

    def epoch(self, step):
        return step / 10

    def step(self, micro_batches, objective, learning_rate, seed, step):
        read = [batch.batch_digest for batch in micro_batches]
        self.events.append(("update", step, read, objective, learning_rate, seed))
        return StepResult(loss=3.0 - step / 10, targets=10, tokens=64, gradient_norm=0.5)

    def agree(self, code):
        self.events.append(("agree", code))
        return code if self.rank == 0 else self.verdict

    def hook(self, name):
        return lambda step: self.events.append((name, step))


def go(recorder, first=0, last=6, **keywords):
    return run(
        recorder,
        recorder,
        "objective",
        learning_rate=lambda step: step / 100,
        first_step=first,
        last_step=last,
        **keywords,
    )


def test_a_step_is_batch_update_observers_watch_verdict_hooks():
    recorder = Recorder()
    verdict = go(
        recorder,
        4,
        5,
        observers=[lambda record: recorder.events.append(("observer", record.step))],
        watch=lambda record: recorder.events.append(("watch", record.step)) or GO_ON,
        hooks=[Hook(1, recorder.hook("evaluate")), Hook(5, recorder.hook("save"))],
    )
    assert verdict == GO_ON
    assert recorder.events == [
        ("batch", 4, 0, 2),
        ("update", 4, ["blocks of 4"], "objective", 0.04, 104),
        ("observer", 4),
        ("watch", 4),
        ("agree", GO_ON),
        ("evaluate", 5),
        ("save", 5),
    ]


def test_hooks_run_every_interval_and_once_after_the_last_step():
    recorder = Recorder()
    go(recorder, 0, 7, hooks=[Hook(3, recorder.hook("a")), Hook(7, recorder.hook("b"))])
    hooks = [event for event in recorder.events if event[0] in "ab"]
    assert hooks == [("a", 3), ("a", 6), ("a", 7), ("b", 7)]


def test_hooks_count_from_the_first_step_of_the_run_not_of_the_attempt():
    recorder = Recorder()
    go(recorder, 4, 10, hooks=[Hook(3, recorder.hook("a"))])
    assert [e for e in recorder.events if e[0] == "a"] == [
        ("a", 6),
        ("a", 9),
        ("a", 10),
    ]


def test_observers_see_every_record_with_all_fields():
    seen = []
    go(Recorder(), 2, 5, observers=[seen.append])
    assert [record.step for record in seen] == [2, 3, 4]
    first = dataclasses.asdict(seen[0])
    assert first.pop("seconds") >= first.pop("data_seconds") >= 0
    assert first == {
        "step": 2,
        "loss": 2.8,
        "gradient_norm": 0.5,
        "learning_rate": 0.02,
        "seed": 102,
        "epoch": 0.2,
        "tokens": 64,
        "targets": 10,
        "loss_scale": 1.0,
        "skipped": False,
        "scale_exhausted": False,
        "batch_digest": "blocks of 2",
        "terms": {},
    }


def test_a_verdict_stops_the_loop_before_the_hooks_of_the_step():
    recorder = Recorder()
    verdict = go(
        recorder,
        hooks=[Hook(1, recorder.hook("save"))],
        watch=lambda record: 75 if record.step == 2 else GO_ON,
    )
    assert verdict == 75
    assert [event for event in recorder.events if event[0] == "save"] == [("save", 1), ("save", 2)]
    assert recorder.events[-1] == ("agree", 75)


def test_other_ranks_neither_observe_nor_watch_and_stop_with_rank_0():
    def never(record):
        pytest.fail("called on rank 1")

    recorder = Recorder(rank=1, verdict=75)
    assert go(recorder, observers=[never], watch=never, hooks=[Hook(1, never)]) == 75
    assert [event[0] for event in recorder.events] == ["batch", "update", "agree"]
    assert recorder.events[0] == ("batch", 0, 1, 2)


def test_a_finished_run_does_nothing():
    recorder = Recorder()
    assert go(recorder, 6, 6, hooks=[Hook(1, recorder.hook("save"))]) == GO_ON
    assert recorder.events == []


def test_speed_is_tokens_per_second_of_the_step():
    record = StepRecord(0, 1.0, 1.0, 1e-3, 1, 0.0, 1000, 150, 4.0, 1.0)
    assert record.tokens_per_second == 250.0


def test_the_loss_weighs_each_term_and_leaves_out_terms_without_targets():
    terms = {"masked": TermLoss(2.0, 10), "order": TermLoss(0.5, 4), "unused": TermLoss(None, 0)}
    assert weighted_loss({"masked": 1.0, "order": 3.0, "unused": 9.0}, terms) == 3.5
