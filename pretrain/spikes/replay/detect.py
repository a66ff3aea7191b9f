"""Run the spike detector over recorded curves, and score it against labels (`pretrain replay`).

`detect` feeds a curve to the detector that runs live and asks the policy for its response; `score`
compares the confirmed spikes with labels; report.py presents both. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.common import records
from pretrain.config.sections import SpikeConfig
from pretrain.config.settings import apply_override
from pretrain.spikes import policy
from pretrain.spikes.detector import Event, SpikeDetector
from pretrain.spikes.replay.curves import Curve

NEAR_RECORDS = 100
"""A spike is the labelled one if its onset lies within so many records of the label."""


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


@dataclasses.dataclass(frozen=True)
class Label:
    """A known spike or blip of a curve."""

    onset: int
    """Step."""
    kind: str = "spike"

    @property
    def wanted(self) -> bool:
        """Whether the detector should confirm it; a blip should be left alone."""
        return self.kind != "blip"


@dataclasses.dataclass(frozen=True)
class Score:
    """Agreement of the confirmed spikes with labels."""

    records: int
    labelled: int
    hits: int
    false: int
    delays: tuple[int, ...]
    """Records from the label to the suspicion, of each hit."""
    confirmations: tuple[int, ...]
    """Records from the label to the confirmation."""
    onset_errors: tuple[int, ...]
    """Records between the label and the dated onset."""

    @property
    def precision(self) -> float:
        """Share of confirmed spikes that are labelled; 1 if none was confirmed."""
        found = self.hits + self.false
        return self.hits / found if found else 1.0

    @property
    def recall(self) -> float:
        """Share of labelled spikes that are confirmed; 1 if none is labelled."""
        return self.hits / self.labelled if self.labelled else 1.0


def spike_config(overrides: Sequence[str]) -> SpikeConfig:
    """The default thresholds, changed by `spike.key=value` overrides.

    Raises:
        ValueError: a key does not exist, or a value is not accepted.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override)
    other = sorted(set(values) - {"spike"})
    if other:
        raise ValueError(records.unknown_key(other[0], ["spike"]))
    return records.decode(SpikeConfig, values.get("spike", {}), "spike.")


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


def read_labels(path: Path, names: Sequence[str]) -> dict[str, list[Label]]:
    """Read a file of labels for the curves of these names.

    Raises:
        ValueError: the file is not {curve name: [{"onset": step, "kind": ...}]}, or has a name that
            is not among `names`.
    """
    form = '{curve name: [{"onset": step, "kind": "fast"}]}'
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        labels = {
            name: sorted(
                (Label(int(e["onset"]), str(e.get("kind", "spike"))) for e in entries),
                key=lambda label: label.onset,
            )
            for name, entries in content.items()
        }
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path}: is not of the form {form}") from None
    unknown = sorted(set(labels) - set(names))
    if unknown:
        raise ValueError(
            f"{path}: labels {unknown[0]!r}, which is none of the curves {', '.join(sorted(names))}"
        )
    return labels


def score(detections: Detections, labels: Sequence[Label]) -> Score:
    """Compare the confirmed spikes of a curve with its labels; each label matches one spike."""
    steps = [observation.step for observation in detections.curve.observations]
    places = {label: bisect_left(steps, label.onset) for label in labels}
    left = [label for label in labels if label.wanted]
    hits: list[tuple[ConfirmedSpike, int]] = []
    for spike in detections.spikes:
        near = [label for label in left if abs(places[label] - spike.onset) <= NEAR_RECORDS]
        if near:
            label = min(near, key=lambda label: abs(places[label] - spike.onset))
            left.remove(label)
            hits.append((spike, places[label]))
    return Score(
        records=len(steps),
        labelled=sum(label.wanted for label in labels),
        hits=len(hits),
        false=len(detections.spikes) - len(hits),
        delays=tuple(spike.alarm - place for spike, place in hits),
        confirmations=tuple(spike.confirmed - place for spike, place in hits),
        onset_errors=tuple(abs(spike.onset - place) for spike, place in hits),
    )


def total(scores: Sequence[Score]) -> Score:
    """Add up the scores of several curves."""
    columns = zip(*map(dataclasses.astuple, scores), strict=True)
    return Score(*(functools.reduce(operator.add, column) for column in columns))
