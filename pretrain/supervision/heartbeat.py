"""What rank 0 of a running attempt is doing, in a small file, and how long it may be silent.

Rank 0 speaks for all: it cannot get past a step, a save or an evaluation that another rank does not
take part in. A reader judges by changes of the file and by its own clock, never by the time of
writing, so that neither a clock that jumps nor another machine's clock matters. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.config.run import SupervisionConfig
from pretrain.supervision import control as orders

FILE_NAME = "heartbeat.json"
INIT, STEP, SAVE, EVALUATE = "init", "step", "save", "evaluate"
_STEP_FACTOR = 10
_ENOUGH_STEPS = 100
"""Fewer have no 99th percentile apart from their largest value, which the first step sets."""


class Heartbeat:
    """Rank 0's side."""

    def __init__(
        self,
        run: Path,
        token: str,
        seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Say nothing yet.

        Args:
            run: the run's folder.
            token: of the attempt.
            seconds: between two beats of one phase.
            clock: in seconds.
        """
        self._path, self._token = orders.folder_of(run) / FILE_NAME, token
        self._seconds, self._clock = seconds, clock
        self._phase, self._next, self._count = "", 0.0, 0

    def beat(self, phase: str, step: int) -> bool:
        """Say that `phase` goes on after `step` updates; returns whether it was time to.

        At most once in `seconds` within a phase: then a file is replaced, else nothing is done.
        """
        now = self._clock()
        if phase == self._phase and now < self._next:
            return False
        self._phase, self._next, self._count = phase, now + self._seconds, self._count + 1
        beat = {"token": self._token, "phase": phase, "step": step, "count": self._count}
        with contextlib.suppress(OSError):  # a full disk is no reason to end; the next one follows
            orders.write_quickly(self._path, beat)
        return True


@dataclasses.dataclass(frozen=True)
class Beat:
    """What rank 0 said last."""

    phase: str
    step: int
    count: int


NO_BEAT = Beat(INIT, 0, 0)
"""Before it has said anything, or where that cannot be read now; no beat has count 0."""


def read(run: Path, token: str) -> Beat:
    """The last beat of the attempt with this token; another attempt's says nothing."""
    values = orders.read_json(orders.folder_of(run) / FILE_NAME)
    if values is None or values.get("token") != token:
        return NO_BEAT
    return Beat(values["phase"], values["step"], values["count"])


def silence_limit(phase: str, step_seconds: Sequence[float], config: SupervisionConfig) -> float:
    """Seconds without a beat after which an attempt hangs.

    Args:
        phase: that it was in.
        step_seconds: what its last steps took.
        config: limits of the phases. A step's is the larger of `hang_seconds` and ten times what
            a step usually takes.
    """
    if phase != STEP:
        limits = {SAVE: config.save_seconds, EVALUATE: config.evaluate_seconds}
        return limits.get(phase, config.init_seconds)
    return max(config.hang_seconds, _STEP_FACTOR * usual_seconds(step_seconds))


def usual_seconds(values: Sequence[float]) -> float:
    """The 99th percentile of the steps' durations; of fewer than 100 steps the lower median.

    The first step is slow (kernels are chosen, code is compiled) and is the largest of a few. No
    step has no duration: 0.
    """
    if len(values) >= _ENOUGH_STEPS:
        return sorted(values)[math.ceil(0.99 * len(values)) - 1]
    return statistics.median_low(values) if values else 0.0
