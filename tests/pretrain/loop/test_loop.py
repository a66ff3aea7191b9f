"""The order of events in a step, with an engine that only records its calls."""

import dataclasses

import pytest

from pretrain.loop.loop import Callbacks, Hook, Rank0Callbacks, run
from pretrain.loop.protocols import GO_ON, Exchanged, MicroBatch, StepResult
from tests.pretrain.builders import step_record


class Recorder:
    """Engine, batches and hooks that record their calls, in order."""

    world_size = 2

    def __init__(self, rank=0, verdict=GO_ON):
        self.rank, self.verdict, self.events = rank, verdict, []

    def micro_batches(self, step, rank, ranks):
        self.events.append(("batch", step, rank, ranks))
        return [MicroBatch(step, {}, 64, (10,), batch_digest=f"blocks of {step}")]

    def seed(self, step):
        return 100 + step

    def epoch(self, step):
        return step / 10

    def step(self, micro_batches, objective, learning_rate, seed, step, *, counts, ahead):
        read = [batch.batch_digest for batch in micro_batches]
        self.events.append(("gradient", step, read, objective, learning_rate, seed, counts))
        added = ahead()
        code = added.code if self.rank == 0 else self.verdict
        self.events.append(("update", step, code))
        return StepResult(
            loss=3.0 - step / 10,
            targets=10,
            tokens=64,
            gradient_norm=0.5,
            exchanged=Exchanged(
                code=code,
                next_counts=(64, 10, step + 1) if added.micro_batches else None,
                measured={name: (value, 0.2) for name, value in added.measured.items()},
            ),
        )

    def agree(self, code):
        self.events.append(("agree", code))
        return code if self.rank == 0 else self.verdict

    def hook(self, name):
        return lambda step: self.events.append((name, step))


def go(recorder, first=0, last=6, **keywords):
    """Run the loop; `keywords` are fields of the callbacks of either kind."""
    of_rank_0 = {field.name for field in dataclasses.fields(Rank0Callbacks)} & keywords.keys()
    rank_0 = Rank0Callbacks(**{name: keywords.pop(name) for name in of_rank_0})
    return run(
        recorder,
        recorder,
        "objective",
        learning_rate=lambda step: step / 100,
        steps=range(first, last),
        callbacks=Callbacks(**keywords),
        rank_0=rank_0,
    )


def test_a_step_is_shown_while_the_next_one_is_computed_and_before_hooks():
    recorder = Recorder()
    verdict = go(
        recorder,
        4,
        6,
        observers=[lambda record: recorder.events.append(("observer", record.step))],
        watch=lambda record: recorder.events.append(("watch", record.step)) or GO_ON,
        stop=lambda steps: recorder.events.append(("stop", steps)) or GO_ON,
        after_step=lambda steps, seconds: recorder.events.append(("after", steps)),
        hooks=[Hook(6, recorder.hook("evaluate")), Hook(6, recorder.hook("save"))],
    )
    assert verdict == GO_ON
    assert recorder.events == [
        ("batch", 4, 0, 2),
        ("gradient", 4, ["blocks of 4"], "objective", 0.04, 104, None),
        ("stop", 5),
        ("batch", 5, 0, 2),
        ("update", 4, GO_ON),
        ("after", 5),
        ("gradient", 5, ["blocks of 5"], "objective", 0.05, 105, (64, 10, 5)),
        ("observer", 4),
        ("watch", 4),
        ("stop", 6),
        ("update", 5, GO_ON),
        ("after", 6),
        ("observer", 5),
        ("watch", 5),
        ("agree", GO_ON),
        ("evaluate", 6),
        ("save", 6),
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
    go(Recorder(), 2, 5, observers=[seen.append], measure=lambda: {"seconds": 0.1})
    assert [record.step for record in seen] == [2, 3, 4]
    first = dataclasses.asdict(seen[0])
    result = first.pop("result")
    assert first.pop("seconds") >= first.pop("data_seconds") >= 0
    assert first == {
        "step": 2,
        "learning_rate": 0.02,
        "seed": 102,
        "epoch": 0.2,
        "batch_digest": "blocks of 2",
        "figures": {},
    }
    assert result == {
        "loss": 2.8,
        "gradient_norm": 0.5,
        "tokens": 64,
        "targets": 10,
        "loss_scale": 1.0,
        "skipped": False,
        "scale_exhausted": False,
        "terms": {},
        "exchanged": {
            "measured": {"seconds": (0.1, 0.2)},
            "code": GO_ON,
            "next_counts": (64, 10, 3),
        },
    }


def test_every_rank_is_told_how_long_it_waited_for_its_next_batch():
    for rank in (0, 1):
        told, seen = [], []
        go(
            Recorder(rank),
            after_step=lambda steps, seconds: told.append(seconds),  # noqa: B023
            observers=[lambda record: seen.append(record.data_seconds)],  # noqa: B023
        )
        assert all(seconds > 0 for seconds in told[:-1])
        assert told[-1] == 0, "there is no batch after the last step"
        assert seen == (told if rank == 0 else [])


@pytest.mark.parametrize("interval", [1, 100])
def test_a_spike_stops_before_any_hook_and_the_update_after_it_is_in_no_record(interval):
    """Where hooks are due after the step the ranks know the verdict before the next update."""
    recorder, seen, watched = Recorder(), [], []
    verdict = go(
        recorder,
        hooks=[Hook(interval, recorder.hook("save"))],
        observers=[lambda record: seen.append(record.step)],
        watch=lambda record: watched.append(record.step) or (75 if record.step == 2 else GO_ON),
    )
    assert verdict == 75
    assert seen == watched == [0, 1, 2]
    updates = [event[1] for event in recorder.events if event[0] == "update"]
    assert updates == ([0, 1, 2] if interval == 1 else [0, 1, 2, 3])
    saves = [event for event in recorder.events if event[0] == "save"]
    assert saves == ([("save", 1), ("save", 2)] if interval == 1 else [])
    assert recorder.events[-1] == ("agree", 75)


@pytest.mark.parametrize("spike", [False, True])
def test_a_stop_ends_the_step_in_which_it_is_asked_for(spike):
    """Every update is recorded, and a spike in the last one takes precedence."""
    recorder, seen = Recorder(), []
    verdict = go(
        recorder,
        hooks=[Hook(3, recorder.hook("save"))],
        observers=[lambda record: seen.append(record.step)],
        watch=lambda record: 75 if spike and record.step == 2 else GO_ON,
        stop=lambda steps: 90 if steps == 3 else GO_ON,
    )
    assert verdict == (75 if spike else 90)
    assert seen == [0, 1, 2]
    assert [event[0] for event in recorder.events[-2:]] == ["update", "agree"]


def test_a_spike_in_the_last_step_stops_before_the_last_hooks():
    recorder = Recorder()
    spiked = go(recorder, watch=lambda record: 75 if record.step == 5 else GO_ON)
    assert spiked == 75
    assert recorder.events[-1] == ("agree", 75)


def test_ranks_meet_once_a_step_where_no_hook_is_due():
    recorder = Recorder()
    go(recorder, hooks=[Hook(4, recorder.hook("save"))])
    meetings = [event for event in recorder.events if event[0] in ("agree", "update")]
    assert [event[0] for event in meetings] == [*["update"] * 4, "agree", *["update"] * 2, "agree"]


def test_a_step_is_shown_even_if_the_next_one_fails():
    recorder, seen = Recorder(), []
    step = recorder.step

    def failing(*arguments, **keywords):
        if arguments[-1] == 2:
            raise KeyboardInterrupt
        return step(*arguments, **keywords)

    recorder.step = failing
    with pytest.raises(KeyboardInterrupt):
        go(recorder, observers=[lambda record: seen.append(record.step)])
    assert seen == [0, 1]


def test_other_ranks_neither_observe_nor_watch_and_stop_with_rank_0():
    def never(record):
        pytest.fail("called on rank 1")

    recorder = Recorder(rank=1, verdict=75)
    hooks = [Hook(1, never)]
    assert go(recorder, observers=[never], watch=never, stop=never, hooks=hooks) == 75
    names = [event[0] for event in recorder.events]
    assert names == ["batch", "gradient", "batch", "update", "agree"]
    assert recorder.events[0] == ("batch", 0, 1, 2)


def test_a_finished_run_does_nothing():
    recorder = Recorder()
    assert go(recorder, 6, 6, hooks=[Hook(1, recorder.hook("save"))]) == GO_ON
    assert recorder.events == []


def test_speed_is_tokens_per_second_of_the_step():
    record = step_record(0, tokens=1000, seconds=4.0)
    assert record.tokens_per_second == 250.0


def test_a_hook_may_stop_the_loop_before_the_next_hook():
    recorder = Recorder()
    hooks = [Hook(4, lambda step: 7), Hook(4, recorder.hook("save"))]
    assert go(recorder, hooks=hooks) == 7
    assert ("save", 4) not in recorder.events
    assert max(event[1] for event in recorder.events if event[0] == "update") == 3
