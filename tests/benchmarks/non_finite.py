"""Updates that are not finite: when a run is suspected and rolled back, live and replayed.

Part of `python -m tests.benchmarks.spikes`.
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.common.exit_codes import EXIT_SPIKE
from pretrain.config.sections import SpikeConfig
from pretrain.records import metrics
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import SpikeWatch
from pretrain.spikes.observations import Event
from pretrain.spikes.replay import read_curve
from tests.pretrain.builders import step_record

STEPS, ONSET = 1_000, 600
_NAN = {"loss": math.nan, "gradient_norm": None}
_SKIPPED = {**_NAN, "skipped": True}
_OVERFLOW = {"gradient_norm": None, "skipped": True, "loss_scale": 8.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of trouble, and when it should be confirmed."""

    name: str
    measured: Callable[[int], dict[str, Any]]
    """Fields of the StepResult that differ so many steps after the onset; {} where all is well."""
    suspected: int | None
    """Most steps from the onset to the first suspicion, or to the spike if there was none."""
    confirmed: int | None
    """Most steps from the onset to the spike; None: it must not be rolled back."""


def _at_smallest_scale(after: int) -> dict[str, Any]:
    """A loss scale that falls from 8 and cannot fall below 1."""
    return {**_OVERFLOW, "loss_scale": max(1.0, 8.0 / 2**after), "scale_exhausted": after >= 3}


CASES = (
    Case("one NaN, skipped", lambda after: _SKIPPED if after == 0 else {}, 0, None),
    Case("one NaN, applied", lambda after: _NAN if after == 0 else {}, 0, 0),
    Case("NaN for ever, skipped", lambda after: _SKIPPED, 0, 5),
    Case("NaN for ever, applied", lambda after: _NAN, 0, 0),
    Case("every third, skipped", lambda after: {} if after % 3 else _SKIPPED, 0, 75),
    Case("every twelfth, skipped", lambda after: {} if after % 12 else _SKIPPED, 0, None),
    Case("3 of 40, skipped", lambda after: _SKIPPED if after % 40 < 3 else {}, 0, None),
    Case("5 of 40, skipped", lambda after: _SKIPPED if after % 40 < 5 else {}, 0, 200),
    Case("fp16, one overflow", lambda after: _OVERFLOW if after == 0 else {}, None, None),
    Case("fp16, every third", lambda after: {} if after % 3 else _OVERFLOW, None, None),
    Case("fp16, for ever", lambda after: _OVERFLOW, 5, 55),
    Case("fp16, at its smallest scale", _at_smallest_scale, 3, 3),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened in a case; numbers count steps from the onset."""

    case: Case
    suspected: int | None
    confirmed: int | None
    onset: int | None
    """Of the spike."""
    alike: bool
    """Whether the recorded run, replayed, has the same events as the live one."""

    @property
    def as_wanted(self) -> bool:
        """Whether it was suspected and confirmed in time, and live as replayed."""
        in_time = all(
            (found is None) == (most is None) and (found or 0) <= (most or 0)
            for found, most in (
                (self.suspected, self.case.suspected),
                (self.confirmed, self.case.confirmed),
            )
        )
        return in_time and self.onset in (None, 0) and self.alike


def outcome(case: Case) -> Outcome:
    """Run a case live, replay what it recorded, and compare."""
    live: list[Event] = []
    watch = SpikeWatch(SpikeDetector(SpikeConfig()), [], live.append)
    with tempfile.TemporaryDirectory() as folder:
        writer = metrics.MetricsWriter(Path(folder), 1)
        for step in range(STEPS):
            changes = case.measured(step - ONSET) if step >= ONSET else {}
            record = step_record(step, **{"loss": 3.0 + 0.05 * math.sin(step * step), **changes})
            writer(record)
            if watch(record) == EXIT_SPIKE:
                break
        recorded = read_curve(Path(folder))
    detector = SpikeDetector(SpikeConfig())
    replayed = [event for seen in recorded for event in detector.update(seen)]
    spike = next((event for event in live if event.kind == "spike"), None)
    return Outcome(
        case,
        suspected=live[0].step - ONSET if live else None,
        confirmed=spike.step - ONSET if spike else None,
        onset=spike.onset - ONSET if spike else None,
        alike=repr(live) == repr(replayed),  # NaN is not equal to itself
    )


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as text."""
    lines = [f"{'not finite':28} suspected confirmed  onset  live and replayed"]
    for each in outcomes:
        numbers = ["-" if n is None else str(n) for n in (each.suspected, each.confirmed)]
        lines.append(
            f"{each.case.name:28} {numbers[0]:>9} {numbers[1]:>9} "
            f"{'-' if each.onset is None else each.onset:>6}  "
            f"{'alike' if each.alike else 'DIFFER'}{'' if each.as_wanted else '   MISSED'}"
        )
    return "\n".join(lines)
