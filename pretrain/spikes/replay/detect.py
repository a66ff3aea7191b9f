"""Run the spike detector over recorded curves (`pretrain replay`); report.py presents the result.

It is the detector that runs live, and the policy is asked for its response.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.common import records
from pretrain.config.load import RUN_FILE, load
from pretrain.config.run import RunConfig
from pretrain.config.sections import SpikeConfig
from pretrain.config.settings import apply_override
from pretrain.spikes import policy
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.observations import Event
from pretrain.spikes.replay.curves import Curve

_CHECKPOINT_INTERVAL = 500
"""Of curves that are not of a run of this package."""


@dataclasses.dataclass(frozen=True)
class ConfirmedSpike:
    """A confirmed spike of a recorded curve; places are record numbers."""

    event: Event
    onset: int
    alarm: int
    """Of the suspicion that was confirmed, or of the spike itself if there was no suspicion."""
    confirmed: int
    plan: policy.Rollback | policy.GiveUp
    """Response of the policy, had every `checkpoint_interval`-th step been saved."""


@dataclasses.dataclass(frozen=True)
class Detections:
    """Findings of the detector on a curve."""

    curve: Curve
    events: tuple[Event, ...]
    spikes: tuple[ConfirmedSpike, ...]


def settings(overrides: Sequence[str], run: Path | None = None) -> tuple[SpikeConfig, int]:
    """The thresholds for a curve, and the steps between its checkpoints.

    Args:
        overrides: `spike.key=value`, each in place of the recipe's or the default value.
        run: the folder of the run that the curve is of.

    Raises:
        ValueError: the run's recipe is not valid, a key does not exist, or a value is not accepted.
    """
    config = load(str(run / RUN_FILE)) if run else RunConfig()
    values: dict[str, Any] = {"spike": dataclasses.asdict(config.spike)}
    for override in overrides:
        apply_override(values, override)
    other = sorted(set(values) - {"spike"})
    if other:
        raise ValueError(records.unknown_key(other[0], ["spike"]))
    interval = config.training.checkpoint_interval if run else _CHECKPOINT_INTERVAL
    return records.decode(SpikeConfig, values["spike"], "spike."), interval


def detect(curve: Curve, config: SpikeConfig, checkpoint_interval: int) -> Detections:
    """Run the detector over a curve, and plan the response to each spike.

    The curve continues as it was recorded, whatever the policy plans: after a spike the detector
    learns the level anew.
    """
    detector = SpikeDetector(config)
    events = [event for seen in curve.seen for event in detector.update(seen)]
    steps = [observation.step for observation in curve.observations]
    spikes: list[ConfirmedSpike] = []
    rollbacks: list[dict[str, Any]] = []
    for event in events:
        if event.kind != "spike":
            continue
        plan = policy.plan(
            dataclasses.asdict(event),
            rollbacks,
            checkpoints=range(checkpoint_interval, event.step + 1, checkpoint_interval),
            seeds=range(1, len(rollbacks) + 2),
            policy=config,
        )
        if isinstance(plan, policy.Rollback):
            rollbacks.append({**dataclasses.asdict(plan), "onset": event.onset})
        alarm = next(
            e.step for e in events if e.onset == event.onset and e.kind in ("suspect", "spike")
        )
        spikes.append(
            ConfirmedSpike(
                event,
                onset=bisect_left(steps, event.onset),  # validation may date it between two records
                alarm=bisect_left(steps, alarm),
                confirmed=bisect_left(steps, event.step),
                plan=plan,
            )
        )
    return Detections(curve, tuple(events), tuple(spikes))
