"""The order of events in a step, with an engine that only remembers."""

import dataclasses

import pytest

from pretrain.loop import GO_ON, Hook, MicroBatch, StepRecord, StepResult, run


class Story:
    """Engine, batches and hooks that write down what they are asked, in order."""

    rank, world_size = 0, 2

    def __init__(self, rank=0, told=GO_ON):
        self.rank, self.told, self.events = rank, told, []

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
        return code if self.rank == 0 else self.told

    def hook(self, name):
        return lambda step: self.events.append((name, step))


def go(story, first=0, last=6, **keywords):
    return run(
        story,
        story,
        "objective",
        learning_rate=lambda step: step / 100,
        first_step=first,
        last_step=last,
        **keywords,
    )


def test_a_step_is_batch_update_observers_watch_verdict_hooks():
    story = Story()
    verdict = go(
        story,
        4,
        5,
        observers=[lambda record: story.events.append(("observer", record.step))],
        watch=lambda record: story.events.append(("watch", record.step)) or GO_ON,
        hooks=[Hook(1, story.hook("evaluate")), Hook(5, story.hook("save"))],
    )
    assert verdict == GO_ON
    assert story.events == [
        ("batch", 4, 0, 2),
        ("update", 4, ["blocks of 4"], "objective", 0.04, 104),
        ("observer", 4),
        ("watch", 4),
        ("agree", GO_ON),
        ("evaluate", 5),
        ("save", 5),
    ]


def test_hooks_come_every_interval_and_after_the_last_step_once():
    story = Story()
    go(story, 0, 7, hooks=[Hook(3, story.hook("a")), Hook(7, story.hook("b"))])
    hooks = [event for event in story.events if event[0] in "ab"]
    assert hooks == [("a", 3), ("a", 6), ("a", 7), ("b", 7)]


def test_hooks_count_from_the_run_s_first_step_not_the_attempt_s():
    story = Story()
    go(story, 4, 10, hooks=[Hook(3, story.hook("a"))])
    assert [event for event in story.events if event[0] == "a"] == [("a", 6), ("a", 9), ("a", 10)]


def test_observers_see_every_record_whole():
    seen = []
    go(Story(), 2, 5, observers=[seen.append])
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


def test_a_verdict_stops_the_loop_before_the_step_s_hooks():
    story = Story()
    verdict = go(
        story,
        hooks=[Hook(1, story.hook("save"))],
        watch=lambda record: 75 if record.step == 2 else GO_ON,
    )
    assert verdict == 75
    assert [event for event in story.events if event[0] == "save"] == [("save", 1), ("save", 2)]
    assert story.events[-1] == ("agree", 75)


def test_other_ranks_neither_observe_nor_watch_and_stop_when_rank_0_says_so():
    def unasked(record):
        pytest.fail("rank 1 was asked")

    story = Story(rank=1, told=75)
    assert go(story, observers=[unasked], watch=unasked, hooks=[Hook(1, unasked)]) == 75
    assert [event[0] for event in story.events] == ["batch", "update", "agree"]
    assert story.events[0] == ("batch", 0, 1, 2)


def test_a_run_that_is_at_its_end_does_nothing():
    story = Story()
    assert go(story, 6, 6, hooks=[Hook(1, story.hook("save"))]) == GO_ON
    assert story.events == []


def test_speed_is_tokens_over_the_step_s_seconds():
    record = StepRecord(0, 1.0, 1.0, 1e-3, 1, 0.0, 1000, 150, 4.0, 1.0)
    assert record.tokens_per_second == 250.0
