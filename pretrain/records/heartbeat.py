"""The heartbeat of a running attempt, and how long it may be silent.

Rank 0 writes its stage and step to a small file, for all ranks: it cannot pass a
step, a save or an evaluation in which another rank does not take part. A reader judges by changes
of the file and by its own monotonic clock, so other nodes' clocks and clock jumps do not matter.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from data_prep.common import files
from pretrain.config.sections import SupervisionConfig
from pretrain.records import control

FILE_NAME = "heartbeat.json"
INIT, STEP, SAVE, EVALUATE = "init", "step", "save", "evaluate"
_BEAT_SECONDS = 5.0
"""Between two beats of one stage."""
_STEP_FACTOR = 10
_SAVE_FACTOR = 3
"""A checkpoint or an evaluation may take this many times as long as the start-up."""
_MIN_STEPS = 100
"""For a 99th percentile; that of fewer steps is their maximum, which is the slow first step."""


class Heartbeat:
    """Writes the heartbeat on rank 0."""

    def __init__(self, run: Path, token: str) -> None:
        """Prepare the heartbeat of the attempt with a token, without writing it."""
        self._path, self._token = control.folder_of(run) / FILE_NAME, token
        self._stage, self._next, self._count = "", 0.0, 0

    def beat(self, stage: str, step: int) -> bool:
        """Write that `stage` is going on after `step` updates; return whether a beat was due.

        A beat is due at each change of stage, and every five seconds within a stage.
        """
        now = time.monotonic()
        if stage == self._stage and now < self._next:
            return False
        self._stage, self._next, self._count = stage, now + _BEAT_SECONDS, self._count + 1
        beat = {"token": self._token, "stage": stage, "step": step, "count": self._count}
        with contextlib.suppress(OSError):  # the reader waits for the next one
            files.replace_json(self._path, beat)
        return True


@dataclasses.dataclass(frozen=True)
class Beat:
    """The last beat of rank 0."""

    stage: str
    step: int
    count: int


NO_BEAT = Beat(INIT, 0, 0)
"""No beat has been written yet, or it cannot be read now. A written beat's count is at least 1."""


def read_heartbeat(run: Path, token: str) -> Beat:
    """Return the last beat of the attempt with this token, or `NO_BEAT`."""
    values = control.read_json(control.folder_of(run) / FILE_NAME)
    if values is None or values.get("token") != token:
        return NO_BEAT
    return Beat(values["stage"], values["step"], values["count"])


def silence_limit(stage: str, step_seconds: Sequence[float], config: SupervisionConfig) -> float:
    """Return the seconds without a beat after which an attempt counts as hung.

    Args:
        stage: of the last beat.
        step_seconds: durations of the last steps. They matter for stage `step`, whose limit is
            `hang_seconds`, or ten times a typical duration if that is longer. While none is known,
            the limit of the start-up applies.
        config: limits of the stages.
    """
    if stage != STEP:
        return config.init_seconds * (_SAVE_FACTOR if stage in (SAVE, EVALUATE) else 1)
    usual = _STEP_FACTOR * _typical(step_seconds) if step_seconds else config.init_seconds
    return max(config.hang_seconds, usual)


def _typical(step_seconds: Sequence[float]) -> float:
    """Return the 99th percentile; of fewer than 100 steps the lower median."""
    if len(step_seconds) >= _MIN_STEPS:
        return sorted(step_seconds)[math.ceil(0.99 * len(step_seconds)) - 1]
    return statistics.median_low(step_seconds)
