"""Channels of the spike detector that have a history of their own: `drift` and `validation`."""

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence

from pretrain.spikes.observations import Evaluation, Event

BLOCK = 256
"""Records whose median is remembered: the noise of a loss nearly cancels."""
MEMORY = 32 * BLOCK
"""Records over which rises add up. A slower rise is overfitting at worst."""
SMALL_NATS = 0.2
"""Largest rise that counts as a new level once it no longer rises. Labelled shifts of the level
begin there; at 0.175, shifts of 0.14 were called spikes."""


class DriftChannel:
    """Rises over thousands of records, and rises that add up.

    Keeps the level from before the first rise until the loss has returned to it.

    A rise of more than `SMALL_NATS` in all is suspected. It is no spike by itself, but a spike of
    any channel begins where the first rise began.
    """

    def __init__(self) -> None:
        """Start without losses."""
        self._losses: list[float] = []
        self._first = 0
        self._medians: deque[tuple[int, float]] = deque(maxlen=MEMORY // BLOCK)
        self._end_rise()

    def _end_rise(self) -> None:
        self._suspected = False
        self.level = math.nan
        """The level before the first rise; NaN while there is none."""
        self.onset: int | None = None

    def begin(self, level: float, onset: int) -> None:
        """Remember a rise above `level`. If there was one before, its onset and level count."""
        self.level = min(level, self.level)  # if this one is NaN, `level`
        self.onset = onset if self.onset is None else min(onset, self.onset)

    def append(self, step: int, loss: float) -> bool:
        """Add a finite loss; returns whether a block is complete and may be judged."""
        if not self._losses:
            self._first = step
        self._losses.append(loss)
        if len(self._losses) < BLOCK:
            return False
        self._medians.append((self._first, statistics.median(self._losses)))
        self._losses = []
        return True

    def judge(self, step: int, deviation: float) -> list[Event]:
        """Judge the last blocks.

        Args:
            step: the last one.
            deviation: of one loss, in nats; a smaller rise is not suspected.
        """
        limit = max(SMALL_NATS, deviation)
        last = self._medians[-1][1]
        if self.onset is not None:
            returned = last <= self.level + limit / 8
            if returned and self._suspected:
                event = Event("healed", "drift", step, self.onset, last, self.level)
                self._end_rise()
                return [event]
            if returned or (not self._suspected and self.onset < self._medians[0][0]):
                self._end_rise()
        level = min(median for _, median in [*self._medians][-2:])  # one block may be a blip
        self._find_rise([*self._medians], level, limit / 2, limit / 8)
        if self._suspected or self.onset is None or level <= self.level + limit:
            return []
        self._suspected = True
        return [Event("suspect", "drift", step, self.onset, level, self.level)]

    def date(self, onset: int, deviation: float) -> None:
        """Remember a rise that led to a spike, even a small one if it lasted to the onset.

        Args:
            onset: of the spike.
            deviation: of one loss, in nats.
        """
        before = [block for block in self._medians if block[0] < onset][:-1]
        if before:
            least = (SMALL_NATS + deviation) / 4
            self._find_rise(before, before[-1][1], least, least / 2)

    def _find_rise(
        self, blocks: Sequence[tuple[int, float]], level: float, least: float, near: float
    ) -> None:
        """Remember a rise by at least `least` above the lowest block, unless it is known.

        It begins with the last block within `near` of the lowest one.
        """
        lowest = min(median for _, median in blocks)
        known = self.level <= lowest + near  # False while there is no rise
        if level > lowest + least and not known:
            low = (first for first, median in reversed(blocks) if median <= lowest + near)
            self.begin(lowest, next(low))


class ValidationChannel:
    """Jumps of the validation loss: compares each evaluation with the last one of the same id.

    The best one would not do: a slowly rising loss is overfitting, which no rollback cures.
    """

    def __init__(self, limit: float, last_step: int) -> None:
        """Start without evaluations.

        Args:
            limit: a rise of more nats is suspected.
            last_step: a rise begins after it.
        """
        self._limit = limit
        self._validation_id = ""
        self._good = (last_step, math.nan)
        """Last step before the last good evaluation, and its loss; NaN where there is none yet."""
        self._suspicion: Event | None = None

    def judge(self, evaluation: Evaluation) -> list[Event]:
        """Judge an evaluation; the caller begins anew after a spike."""
        value, step = evaluation.loss, evaluation.updates - 1
        is_other = evaluation.validation_id != self._validation_id
        self._validation_id = evaluation.validation_id
        if is_other:
            self._good = (self._good[0], math.nan)
        last_good, before = self._good
        suspicion = self._suspicion
        # Where there is no evaluation before, every finite value is good.
        if not math.isfinite(value) or value > before + self._limit:
            onset = last_good + 1  # the earliest possible one
            event = Event("suspect", "validation", step, onset, value, before)
            if suspicion:
                return [dataclasses.replace(event, kind="spike")]
            self._suspicion = event
            return [event]
        if is_other and suspicion:
            # The next evaluation is compared with this one. Of the same weights, it has risen too.
            rise = suspicion.loss - suspicion.baseline
            risen = rise if suspicion.step == step and math.isfinite(rise) else 0.0
            self._good = (last_good, value - risen)
            return []
        self._good, self._suspicion = (step, value), None
        if suspicion is None:
            return []
        return [Event("healed", "validation", step, suspicion.onset, value, before)]
