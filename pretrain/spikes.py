"""Loss spikes: when a loss counts as one, and what to do then. Plain numbers in, plain records out.

Two stages. *Suspect*: several of the last losses stand far above the median of those before, in
units of the median absolute deviation; outliers never enter the window that judges. *Confirm*: the
loss does not return within a number of steps, or it is not finite, or the rise is gross. A rollback
goes back from the onset, not from the alarm.

The detector is a fold over (step, loss): feeding it the surviving steps of metrics.jsonl after a
restart gives the state it had. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from pretrain.config import SpikeConfig

_MAD_TO_DEVIATION = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""
_SMALLEST_DEVIATION = 0.01
"""Nats. A loss that hardly moves would otherwise make an outlier of any noise."""
_RETURNED_DEVIATIONS = 3.0


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that the detector has to say about a step."""

    kind: str
    """suspect, healed or spike"""
    step: int
    """When it was said."""
    onset: int
    """First step of the rise."""
    loss: float
    """Median loss since the onset, in nats."""
    baseline: float
    """Median loss before it, in nats."""


class SpikeDetector:
    """The detector's state: the last losses that were no outliers, and the open suspicion."""

    def __init__(self, config: SpikeConfig) -> None:
        """An empty history."""
        self.config = config
        self._window: deque[float] = deque(maxlen=config.window)
        self._recent: deque[tuple[int, float, bool]] = deque(maxlen=config.patience + 2)
        self._suspected: list[tuple[int, float]] = []

    def update(self, step: int, loss: float) -> Event | None:
        """Take in the loss of the next step, in nats."""
        if not math.isfinite(loss):
            baseline = float(np.median(self._window)) if self._window else math.nan
            return Event(
                "spike", step, self._suspected[0][0] if self._suspected else step, loss, baseline
            )
        if len(self._window) < self.config.minimum_history:
            self._window.append(loss)
            return None
        history = np.fromiter(self._window, float)
        center = float(np.median(history))
        spread = _MAD_TO_DEVIATION * float(np.median(np.abs(history - center)))
        spread = max(spread, _SMALLEST_DEVIATION)
        outlier = loss > center + self.config.deviations * spread
        self._recent.append((step, loss, outlier))
        if self._suspected:
            self._suspected.append((step, loss))
            return self._judge(step, center, spread)
        if not outlier:
            self._window.append(loss)
            return None
        outliers = [(s, value) for s, value, far in self._recent if far]
        if len(outliers) < self.config.patience:
            return None
        self._suspected = outliers
        return self._judge(step, center, spread) or self._event("suspect", step, center)

    def _judge(self, step: int, center: float, spread: float) -> Event | None:
        """Whether the open suspicion heals, is confirmed, or stays open."""
        recent = [value for _, value in self._suspected[-self.config.patience :]]
        level = float(np.median(recent))
        if level <= center + _RETURNED_DEVIATIONS * spread:
            event = self._event("healed", step, center)
            self._suspected = []
            self._recent.clear()
            return event
        waited = step - self._suspected[0][0]
        if level > center + self.config.gross_nats or waited >= self.config.confirm_steps:
            return self._event("spike", step, center)
        return None

    def _event(self, kind: str, step: int, baseline: float) -> Event:
        loss = float(np.median([value for _, value in self._suspected]))
        return Event(kind, step, self._suspected[0][0], loss, baseline)


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Go back to a checkpoint and on with another seed."""

    step: int
    """Of the checkpoint; 0: from the initial weights."""
    seed: int


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """Stop, and say why."""

    reason: str


def plan(
    onset: int,
    checkpoints: Sequence[int],
    seeds: Sequence[int],
    rollbacks: int,
    policy: SpikeConfig,
) -> Rollback | GiveUp:
    """What to do about a confirmed spike.

    Args:
        onset: its first step.
        checkpoints: steps of the committed checkpoints on the run's lineage.
        seeds: every seed used so far.
        rollbacks: how many there were.
        policy: budgets and margins.
    """
    if rollbacks >= policy.max_rollbacks:
        return GiveUp(
            f"{rollbacks} rollbacks did not help: the instability looks structural, not a matter "
            "of data order (learning rate, precision or architecture)"
        )
    # A checkpoint of step n has seen the steps below n: n <= onset saw nothing of the spike.
    clean = [step for step in checkpoints if step <= onset]
    early = [step for step in clean if step <= onset - policy.margin_steps]
    # After a rollback there may be none that early left: then the oldest clean one, not step 0.
    step = max(early, default=min(clean, default=0))
    return Rollback(step=step, seed=max(seeds) + 1)
