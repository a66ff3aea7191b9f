"""The training loop, for every objective and for fine-tuning.

It owns the order of events in a step and nothing else: batches, engine, schedule, observers and
hooks are arguments (protocols.py).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pretrain.loop.protocols import (
    GO_ON,
    Batches,
    MicroBatch,
    Objective,
    StepEngine,
    StepInput,
    StepRecord,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Hook:
    """An action of all ranks after every `interval` updates, and after the last."""

    interval: int
    action: Callable[[int], int | None]
    """Called with the number of updates done; a verdict that it gives is equal on all ranks."""

    def is_due(self, steps: int, last_step: int) -> bool:
        """Whether the action is due after `steps` updates."""
        return steps % self.interval == 0 or steps == last_step


def run(
    engine: StepEngine,
    batches: Batches,
    objective: Objective,
    *,
    learning_rate: Callable[[int], float],
    steps: range,
    observers: Sequence[Callable[[StepRecord], int | None]] = (),
    hooks: Sequence[Hook] = (),
    measure: Callable[[float, Sequence[MicroBatch]], Mapping[str, float]] = lambda *_: {},
) -> int:
    """Train for `steps`, or until a verdict other than GO_ON, and return the verdict.

    Args:
        engine: does the update.
        batches: gives each step's micro-batches.
        objective: gives each micro-batch's loss.
        learning_rate: of a step.
        steps: numbers of the updates.
        observers: called on rank 0 with each finished step, in turn until one gives a verdict. It
            stops every rank after that step, before any hook.
        hooks: called on every rank, in turn until one gives a verdict.
        measure: called on every rank before each step, with the seconds that the rank waited for
            its micro-batches and these, after the last step none; gives `StepRecord.measured`.
    """
    if not steps:
        return GO_ON
    started = time.perf_counter()
    micro_batches, data_seconds = _read(batches, steps.start, engine)
    own = measure(data_seconds, micro_batches)
    counts, verdict, measured = exchange(engine, micro_batches, GO_ON, own)
    for step in steps:
        done, rate, (first, *_) = step + 1, learning_rate(step), micro_batches
        given = StepInput(step, micro_batches, objective, counts)
        losses = engine.backward(given)
        # A GPU still computes the gradient while the next batch is read.
        is_last = done == steps.stop
        micro_batches, data_seconds = ((), 0.0) if is_last else _read(batches, done, engine)
        result = engine.update(given, losses, rate)
        ended = time.perf_counter()
        record = StepRecord(
            step,
            result,
            learning_rate=rate,
            seed=first.seed,
            epoch=first.epoch,
            seconds=ended - started,
            data_seconds=data_seconds,
            batch_digest=first.batch_digest,
            measured=measured,
        )
        started = ended
        verdict = _ask(observers, record) if engine.rank == 0 else GO_ON
        own = measure(data_seconds, micro_batches)
        counts, verdict, measured = exchange(engine, micro_batches, verdict, own)
        if verdict == GO_ON and (due := [h.action for h in hooks if h.is_due(done, steps.stop)]):
            verdict = _ask(due, done)
            started = time.perf_counter()  # the time of hooks is no step's
        if verdict != GO_ON:
            return verdict
    return GO_ON


def _read(batches: Batches, step: int, engine: StepEngine) -> tuple[Sequence[MicroBatch], float]:
    """Return what this rank reads in a step, and the seconds that it waited for it."""
    asked = time.perf_counter()
    micro_batches = batches(step, engine.rank, engine.world_size)
    return micro_batches, time.perf_counter() - asked


def exchange(
    engine: StepEngine,
    micro_batches: Sequence[MicroBatch],
    verdict: int = GO_ON,
    measured: Mapping[str, float] = {},
) -> tuple[tuple[int, ...], int, dict[str, tuple[float, ...]]]:
    """Tell every rank what each has read and measured, and rank 0's verdict.

    The gradient of a batch needs the counts of the whole global batch.

    Args:
        engine: connects the ranks.
        micro_batches: of this rank in the next step; none after the last one.
        verdict: that of other ranks is ignored.
        measured: numbers by name; the same names on every rank.

    Returns:
        Tokens, and targets of each term, in the global batch; the verdict; what was measured, of
        each rank.
    """
    columns = zip(*((each.tokens, *each.targets) for each in micro_batches), strict=True)
    own = [verdict, *measured.values(), *map(sum, columns)]
    (found, *_), *others = zip(*engine.gather(own), strict=True)
    numbers = dict(zip(measured, others, strict=False))
    counts = tuple(int(sum(column)) for column in others[len(measured) :])
    return counts, int(found), numbers


def _ask(actions: Sequence[Callable[[T], int | None]], argument: T) -> int:
    """Call in turn until one gives a verdict other than GO_ON; returns the last one."""
    return next(filter(None, (action(argument) for action in actions)), GO_ON)
