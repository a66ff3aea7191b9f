"""The training loop, for every objective and for fine-tuning.

It owns the order of events in a step and nothing else: batches, engine, schedule and hooks are
arguments (protocols.py). A hook called with `s` sees a model after `s` updates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pretrain.loop.protocols import (
    GO_ON,
    Ahead,
    Batches,
    MicroBatch,
    Objective,
    StepEngine,
    StepRecord,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Hook:
    """An action of all ranks after every `interval` updates, and after the last."""

    interval: int
    action: Callable[[int], int | None]
    """Its verdict, if it gives one, is equal on all ranks; see `GO_ON`."""

    def is_due(self, steps: int, last_step: int) -> bool:
        """Whether the action is due after `steps` updates."""
        return steps % self.interval == 0 or steps == last_step


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """What every rank does beside the updates."""

    hooks: Sequence[Hook] = ()
    """Called in order; a verdict other than GO_ON ends the loop before the next one."""
    after_step: Callable[[int, float], None] = lambda steps, data_seconds: None
    """Called with the number of updates done, and the seconds that this rank waited for the batch
    of the next step; must not wait for other ranks."""
    measure: Callable[[], Mapping[str, Tensor | float]] = dict
    """Called in each step, gives `Ahead.measured`."""


@dataclasses.dataclass(frozen=True)
class Rank0Callbacks:
    """What rank 0 does with finished steps."""

    observers: Sequence[Callable[[StepRecord], None]] = ()
    """Called with each finished step; they cannot steer."""
    watch: Callable[[StepRecord], int] = lambda record: GO_ON
    """Called after the observers; a verdict other than GO_ON stops every rank before any other
    hook. The update that was computed meanwhile, if any, is in no record."""
    stop: Callable[[int], int] = lambda steps: GO_ON
    """Called towards the end of each step, with the number of updates at its end; a verdict other
    than GO_ON stops every rank after this step, before its hooks. The watch's verdict on this step
    takes precedence."""


def _act(hooks: Sequence[Hook], steps: int) -> int:
    """Do the hooks' actions until one gives a verdict other than GO_ON; returns the last one."""
    for hook in hooks:
        verdict = hook.action(steps)
        if verdict is not None and verdict != GO_ON:
            return verdict
    return GO_ON


class _Judge:
    """Shows finished steps to rank 0's callbacks, and asks whether to stop."""

    def __init__(self, callbacks: Rank0Callbacks) -> None:
        self._callbacks = callbacks
        self._record: StepRecord | None = None
        self._verdict = GO_ON

    def add(self, record: StepRecord) -> None:
        """Take a step that is to be shown; one that follows a spike is not."""
        if self._verdict == GO_ON:
            self._record = record

    def settle(self) -> int:
        """Show the newest step unless it was shown before; returns the watch's verdict."""
        record, self._record = self._record, None
        if record is not None:
            for observer in self._callbacks.observers:
                observer(record)
            self._verdict = self._callbacks.watch(record)
        return self._verdict

    @contextlib.contextmanager
    def settled_if_raises(self) -> Iterator[None]:
        """Show the newest step even if what comes after it fails."""
        try:
            yield
        except BaseException:
            self.settle()
            raise

    def code(self, steps: int) -> int:
        """The watch's verdict on the step before, or whether to stop after `steps` updates."""
        verdict = self.settle()
        return verdict if verdict != GO_ON else self._callbacks.stop(steps)


class _Reader:
    """Reads this rank's batch of one step after the other."""

    def __init__(self, batches: Batches, engine: StepEngine, last_step: int) -> None:
        self._batches, self._engine, self._last_step = batches, engine, last_step
        self.micro_batches: Sequence[MicroBatch] = ()
        """Of the step that was read last."""
        self.seconds = 0.0
        """Time that the last call of `read` took."""

    def read(self, step: int) -> Sequence[MicroBatch]:
        """Read the batch of a step; there is none after the last one."""
        self.micro_batches, self.seconds = (), 0.0
        if step < self._last_step:
            started = time.perf_counter()
            self.micro_batches = self._batches.micro_batches(
                step, self._engine.rank, self._engine.world_size
            )
            self.seconds = time.perf_counter() - started
        return self.micro_batches


def run(
    engine: StepEngine,
    batches: Batches,
    objective: Objective,
    *,
    learning_rate: Callable[[int], float],
    steps: range,
    callbacks: Callbacks = Callbacks(),
    rank_0: Rank0Callbacks = Rank0Callbacks(),
) -> int:
    """Train for `steps`.

    The ranks meet once a step: the reduction of a step's losses also carries the counts of the next
    global batch and rank 0's code. Rank 0 shows a step to observers and watch while the device
    computes the next one, but before any hook that is due.

    Args:
        engine: does the update.
        batches: gives each step's micro-batches.
        objective: gives each micro-batch's loss.
        learning_rate: function of the step.
        steps: numbers of the updates.
        callbacks: called on every rank.
        rank_0: called on rank 0 alone.

    Returns:
        The verdict: GO_ON after the last step.
    """
    judge = _Judge(Rank0Callbacks() if engine.rank else rank_0)
    reader = _Reader(batches, engine, steps.stop)
    reader.read(steps.start)
    counts: tuple[int, ...] | None = None
    with judge.settled_if_raises():
        for step in steps:
            started = time.perf_counter()
            micro_batches, done = reader.micro_batches, step + 1

            def ahead(done: int = done) -> Ahead:
                code = judge.code(done)  # before waiting for the batch
                return Ahead(reader.read(done), code, callbacks.measure())

            rate, seed = learning_rate(step), batches.seed(step)
            result = engine.step(
                micro_batches, objective, rate, seed, step, counts=counts, ahead=ahead
            )
            exchanged = result.exchanged
            counts = exchanged.next_counts
            judge.add(
                StepRecord(
                    step,
                    result,
                    learning_rate=rate,
                    seed=seed,
                    epoch=batches.epoch(step),
                    seconds=time.perf_counter() - started,
                    data_seconds=reader.seconds,
                    batch_digest=micro_batches[0].batch_digest,
                )
            )
            callbacks.after_step(done, reader.seconds)
            due = [hook for hook in callbacks.hooks if hook.is_due(done, steps.stop)]
            if due or exchanged.code != GO_ON or done == steps.stop:
                found = judge.settle()
                verdict = engine.agree(exchanged.code if found == GO_ON else found)
                if verdict != GO_ON:
                    return verdict
            if (verdict := _act(due, done)) != GO_ON:
                return verdict
    return GO_ON
