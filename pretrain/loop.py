"""The training loop: the only one, for every objective and for fine-tuning.

The loop owns the order of events in a step and nothing else: batches, engine, schedule and what
happens at intervals come in as arguments. Steps count from 0; step `s` reads global batch `s`, and
a hook called with `s` sees a model after `s` updates.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

Model = Callable[..., "Tensor"]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What one rank sees in one forward pass."""

    index: int
    """Among the micro-batches of the global batch: keys the dropout of this pass."""
    arrays: dict[str, npt.NDArray[np.generic]]
    tokens: int
    """Real input tokens."""
    targets: int
    """Tokens that the loss is summed over."""
    blocks: str = ""
    """`order.digest` of the whole global batch, for whoever audits what was read."""


class Objective(Protocol):
    """What is to be learned from a batch."""

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> Tensor:
        """Loss summed over the batch's targets, in nats; the engine divides by their number."""
        ...


class Batches(Protocol):
    """Where batches come from."""

    def seed(self, step: int) -> int:
        """Seed of the randomness (dropout) of a step."""
        ...

    def epoch(self, step: int) -> float:
        """Epochs read before a step."""
        ...

    def micro_batches(self, step: int, rank: int, world_size: int) -> Sequence[MicroBatch]:
        """What one rank reads in a step."""
        ...


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What an engine says of a finished update; sums are over all ranks."""

    loss_sum: float
    targets: float
    tokens: float
    gradient_norm: float | None
    """Before clipping; None where it was not finite."""
    loss_scale: float = 1.0
    """Of fp16, in force in this update; 1 in any other precision."""
    skipped: bool = False
    """The engine left the update out, for its gradient was not finite."""
    scale_exhausted: bool = False
    """fp16 skipped this update at its smallest loss scale: there is nothing left to lower."""


class StepEngine(Protocol):
    """What the loop needs of an engine."""

    rank: int
    world_size: int

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        learning_rate: float,
        seed: int,
        step: int,
    ) -> StepResult:
        """One optimiser update from this rank's micro-batches."""
        ...

    def agree(self, code: int) -> int:
        """Rank 0's code, on every rank."""
        ...


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A finished step, as observers see it and metrics.jsonl keeps it."""

    step: int
    loss: float
    """Nats a target, over the global batch."""
    gradient_norm: float | None
    learning_rate: float
    seed: int
    epoch: float
    tokens: int
    targets: int
    seconds: float
    data_seconds: float
    loss_scale: float = 1.0
    skipped: bool = False
    scale_exhausted: bool = False
    blocks: str = ""
    """Hash of the names of what all ranks read, where the batches tell it."""

    @property
    def tokens_per_second(self) -> float:
        """Real input tokens of all ranks, per second of the step."""
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Hook:
    """Something that all ranks do together after every `interval` updates, and after the last."""

    interval: int
    action: Callable[[int], None]

    def is_due(self, steps: int, last_step: int) -> bool:
        """Whether the action comes after so many updates."""
        return steps % self.interval == 0 or steps == last_step


GO_ON = 0
"""Verdict of a watch that has nothing to say; any other number stops the loop on all ranks."""


def run(
    engine: StepEngine,
    batches: Batches,
    objective: Objective,
    *,
    learning_rate: Callable[[int], float],
    first_step: int,
    last_step: int,
    hooks: Sequence[Hook] = (),
    observers: Sequence[Callable[[StepRecord], None]] = (),
    watch: Callable[[StepRecord], int] = lambda record: GO_ON,
) -> int:
    """Train from `first_step` up to, not including, `last_step`.

    Args:
        engine: does the update.
        batches: gives each step's micro-batches.
        objective: gives each micro-batch's loss.
        learning_rate: of a step.
        first_step: updates done before.
        last_step: updates done after.
        hooks: called on every rank, in order.
        observers: called on rank 0 with each finished step; they cannot steer.
        watch: asked on rank 0 after the observers; a verdict other than GO_ON stops every rank at
            this step's end, before its hooks.

    Returns:
        The verdict: GO_ON after the last step.
    """
    for step in range(first_step, last_step):
        started = time.perf_counter()
        micro_batches = batches.micro_batches(step, engine.rank, engine.world_size)
        loaded = time.perf_counter()
        rate, seed = learning_rate(step), batches.seed(step)
        result = engine.step(micro_batches, objective, rate, seed, step)
        verdict = GO_ON
        if engine.rank == 0:
            record = StepRecord(
                step=step,
                loss=result.loss_sum / result.targets,
                gradient_norm=result.gradient_norm,
                learning_rate=rate,
                seed=seed,
                epoch=batches.epoch(step),
                tokens=int(result.tokens),
                targets=int(result.targets),
                seconds=time.perf_counter() - started,
                data_seconds=loaded - started,
                loss_scale=result.loss_scale,
                skipped=result.skipped,
                scale_exhausted=result.scale_exhausted,
                blocks=micro_batches[0].blocks,
            )
            for observer in observers:
                observer(record)
            verdict = watch(record)
        verdict = engine.agree(verdict)
        if verdict != GO_ON:
            return verdict
        for hook in hooks:
            if hook.is_due(step + 1, last_step):
                hook.action(step + 1)
    return GO_ON
