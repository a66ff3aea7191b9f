"""The order of events in a step, with an engine that only records its calls."""

import dataclasses

import pytest

from pretrain.loop.loop import Hook, run
from pretrain.loop.protocols import GO_ON, MicroBatch, StepResult

SPIKE, STOP = 75, 90


class Recorder:
    """Engine, batches and hooks of one of two ranks, which record their calls in order."""

    world_size = 2

    def __init__(self, rank=0, verdict=GO_ON):
        self.rank, self.verdict, self.events = rank, verdict, []

    def micro_batches(self, step, rank, ranks):
        self.events.append(("batch", step, rank, ranks))
        return [MicroBatch(step, {}, 64, (10, step), 100 + step, step / 10, f"blocks of {step}")]

    def gather(self, values):
        _, *others = values
        rows = [[self.verdict, *others]] * 2
        rows[self.rank] = values
        self.events.append(("exchange", rows[0][0]))
        return rows

    def backward(self, given):
        read = [batch.batch_digest for batch in given.micro_batches]
        self.events.append(("gradient", given.step, read, given.objective, given.counts))
        return f"losses of {given.step}"

    def update(self, given, losses, learning_rate):
        assert given.counts == (128, 20, 2 * given.step)
        self.events.append(("update", given.step, losses, given.objective, learning_rate))
        return StepResult(loss=3.0 - given.step / 10, targets=10, tokens=64, gradient_norm=0.5)

    def hook(self, name):
        return lambda step: self.events.append((name, step))

    def observer(self, name):
        return lambda record: self.events.append((name, record.step))

    def steps_of(self, name):
        return [event[1] for event in self.events if event[0] == name]


def go(recorder, first=0, last=6, **more):
    more |= {"learning_rate": lambda step: step / 100, "steps": range(first, last)}
    return run(recorder, recorder.micro_batches, "objective", **more)


def verdict_at(step, verdict):
    return lambda record: verdict if record.step == step else GO_ON


def test_the_events_of_a_step():
    recorder = Recorder()
    observers = [recorder.observer(name) for name in ("shown", "judged")]
    hooks = [Hook(6, recorder.hook(name)) for name in ("evaluate", "save")]
    assert go(recorder, 4, 6, observers=observers, hooks=hooks) == GO_ON
    assert recorder.events == [
        ("batch", 4, 0, 2),
        ("exchange", GO_ON),
        ("gradient", 4, ["blocks of 4"], "objective", (128, 20, 8)),
        ("batch", 5, 0, 2),
        ("update", 4, "losses of 4", "objective", 0.04),
        ("shown", 4),
        ("judged", 4),
        ("exchange", GO_ON),
        ("gradient", 5, ["blocks of 5"], "objective", (128, 20, 10)),
        ("update", 5, "losses of 5", "objective", 0.05),
        ("shown", 5),
        ("judged", 5),
        ("exchange", GO_ON),
        ("evaluate", 6),
        ("save", 6),
    ]


def test_hooks_run_every_interval_of_the_run_and_once_after_its_last_step():
    recorder = Recorder()
    go(recorder, 4, 10, hooks=[Hook(3, recorder.hook("a")), Hook(5, recorder.hook("b"))])
    assert recorder.steps_of("a") == [6, 9, 10]
    assert recorder.steps_of("b") == [5, 10]


def test_observers_see_every_record_with_all_fields():
    """What is measured before a step is in its record, of each rank."""
    seen, waited = [], []

    def measure(data_seconds, micro_batches):
        waited.append(data_seconds)
        return {"number": len(waited), "other": 0.5}

    go(Recorder(), 2, 5, observers=[seen.append], measure=measure)
    assert [record.step for record in seen] == [2, 3, 4]
    assert [record.data_seconds for record in seen] == waited[1:]
    assert all(seconds > 0 for seconds in waited[:3])
    assert [record.measured["number"] for record in seen] == [(1, 1), (2, 2), (3, 3)]
    first = dataclasses.asdict(seen[0])
    assert first.pop("seconds") >= first.pop("data_seconds") >= 0
    assert first.pop("result") == {
        **{"loss": 2.8, "gradient_norm": 0.5, "tokens": 64, "targets": 10, "terms": {}},
        **{"loss_scale": 1.0, "skipped": False, "scale_exhausted": False},
    }
    assert first == {
        **{"step": 2, "learning_rate": 0.02, "seed": 102, "epoch": 0.2, "figures": {}},
        "batch_digest": "blocks of 2",
        "measured": {"number": (1, 1), "other": (0.5, 0.5)},
    }


@pytest.mark.parametrize("step", [2, 5])
def test_a_spike_stops_its_own_step_before_any_hook(step):
    """No update is done that stands in no record; 5 is the last step."""
    recorder = Recorder()
    verdict = go(
        recorder,
        observers=[recorder.observer("shown"), verdict_at(step, SPIKE)],
        hooks=[Hook(step + 1, recorder.hook("save"))],
    )
    assert verdict == SPIKE
    assert recorder.steps_of("shown") == recorder.steps_of("update") == [*range(step + 1)]
    assert recorder.events[-1] == ("exchange", SPIKE)


@pytest.mark.parametrize("spike", [False, True])
def test_a_spike_takes_precedence_over_a_request_to_stop(spike):
    recorder = Recorder()
    observers = [*([verdict_at(2, SPIKE)] if spike else []), verdict_at(2, STOP)]
    assert go(recorder, observers=observers) == (SPIKE if spike else STOP)
    assert recorder.steps_of("update") == [0, 1, 2]


def test_other_ranks_observe_nothing_and_stop_with_rank_0():
    def never(record):
        pytest.fail("called on rank 1")

    recorder = Recorder(rank=1)
    gather = recorder.gather

    def rank_0_stops_after_a_step(values):
        recorder.verdict = STOP if recorder.steps_of("update") else GO_ON
        return gather(values)

    recorder.gather = rank_0_stops_after_a_step
    assert go(recorder, observers=[never], hooks=[Hook(1, never)]) == STOP
    assert recorder.events[0] == ("batch", 0, 1, 2)
    assert recorder.steps_of("update") == [0]


def test_a_finished_run_does_nothing():
    recorder = Recorder()
    assert go(recorder, 6, 6, hooks=[Hook(1, recorder.hook("save"))]) == GO_ON
    assert recorder.events == []


def test_a_hook_may_stop_the_loop_before_the_next_hook():
    recorder = Recorder()
    hooks = [Hook(4, lambda step: STOP), Hook(4, recorder.hook("save"))]
    assert go(recorder, hooks=hooks) == STOP
    assert recorder.steps_of("save") == []
    assert recorder.steps_of("update") == [0, 1, 2, 3]
