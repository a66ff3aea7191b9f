"""The spike detector over recorded curves: `python -m pretrain replay`. No torch.

`judge` folds a curve through the detector that runs live, and asks the policy what it would do;
`score` compares what was found with labels; replay_report.py shows it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import records
from pretrain.config.run import SpikeConfig
from pretrain.config.settings import apply_override
from pretrain.spikes import policy
from pretrain.spikes.detector import Event, SpikeDetector
from pretrain.spikes.replay.curves import Curve
from pretrain.spikes.replay.published_rules import RULES, incidents

NEAR_RECORDS = 100
"""A spike is the labelled one if its onset is dated within so many records of the label."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A confirmed spike of a recorded curve; places are numbers of records."""

    event: Event
    onset: int
    alarm: int
    """Of the suspicion that was confirmed, or of the spike where nothing was suspected before."""
    confirmed: int
    plan: policy.Rollback | policy.GiveUp
    """What the policy would do, had every `checkpoint_interval`-th step been saved."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """What the detector and the published rules say of a curve."""

    curve: Curve
    events: tuple[Event, ...]
    spikes: tuple[Found, ...]
    rules: Mapping[str, Sequence[int]]
    """Records at which each published rule raises an alarm, groups of them counted once."""


@dataclasses.dataclass(frozen=True)
class Label:
    """A spike, or a blip, that is known to be there."""

    onset: int
    """Step."""
    kind: str = "spike"

    @property
    def wanted(self) -> bool:
        """Whether it is to be found; a blip is to be left alone."""
        return self.kind != "blip"


@dataclasses.dataclass(frozen=True)
class Score:
    """How well what was found agrees with labels."""

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
        """Share of what was found that was labelled; 1 where nothing was found."""
        found = self.hits + self.false
        return self.hits / found if found else 1.0

    @property
    def recall(self) -> float:
        """Share of what was labelled that was found; 1 where nothing was."""
        return self.hits / self.labelled if self.labelled else 1.0


def spike_config(words: Sequence[str]) -> SpikeConfig:
    """Thresholds with `spike.key=value` words in place of the defaults.

    Raises:
        ValueError: a key that does not exist, or a value that is not accepted.
    """
    values: dict[str, Any] = {}
    for word in words:
        apply_override(values, word)
    other = sorted(set(values) - {"spike"})
    if other:
        raise ValueError(records.unknown_key(other[0], other[0], ["spike"]))
    return records.decode(SpikeConfig, values.get("spike", {}), "spike.")


def judge(curve: Curve, config: SpikeConfig, checkpoint_interval: int) -> Judged:
    """What the detector says of a curve, and what the policy would have done each time.

    The curve goes on as it was recorded, whatever the policy would have done: after a spike the
    detector learns the level anew.
    """
    detector = SpikeDetector(config)
    events: list[Event] = []
    for observation in curve.observations:
        events += detector.update(observation)
    record = {o.step: number for number, o in enumerate(curve.observations)}
    spikes: list[Found] = []
    for event in events:
        if event.kind == "spike":
            alarm = next(e.step for e in events if (e.onset, e.kind) in _alarms(event))
            plan = _planned(event, spikes, config, checkpoint_interval)
            spikes.append(
                Found(event, _record_of(event, record), record[alarm], record[event.step], plan)
            )
    losses = [observation.loss for observation in curve.observations]
    alarms = {name: incidents(rule(losses)) for name, rule in RULES.items()}
    return Judged(curve, tuple(events), tuple(spikes), alarms)


def _alarms(spike: Event) -> set[tuple[int, str]]:
    return {(spike.onset, "suspect"), (spike.onset, "spike")}


def _record_of(event: Event, record: Mapping[int, int]) -> int:
    """Of the onset, which the validation channel may date between two records."""
    return min(number for step, number in record.items() if step >= event.onset)


def _planned(
    event: Event, earlier: Sequence[Found], config: SpikeConfig, interval: int
) -> policy.Rollback | policy.GiveUp:
    rollbacks = [
        {"onset": found.event.onset, "step": found.plan.step, "rung": found.plan.rung}
        for found in earlier
        if isinstance(found.plan, policy.Rollback)
    ]
    return policy.plan(
        [dataclasses.asdict(event)],
        rollbacks,
        range(interval, event.step + 1, interval),
        range(1, len(rollbacks) + 2),
        config,
    )


def read_labels(path: Path, names: Sequence[str]) -> dict[str, list[Label]]:
    """The labels of a file, for the curves of these names.

    Raises:
        ValueError: the file is not {curve name: [{"onset": step, "kind": ...}]}, or names none of
            the curves.
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
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path}: is not of the form {form}") from None
    unknown = sorted(set(labels) - set(names))
    if unknown:
        raise ValueError(
            f"{path}: labels {unknown[0]!r}, which is none of the curves {', '.join(sorted(names))}"
        )
    return labels


def score(judged: Judged, labels: Sequence[Label]) -> Score:
    """Compare a curve's confirmed spikes with its labels, each of which is found once at most."""
    steps = [observation.step for observation in judged.curve.observations]
    places = {label: sum(step < label.onset for step in steps) for label in labels}
    left = [label for label in labels if label.wanted]
    hits: list[tuple[Found, int]] = []
    for found in judged.spikes:
        near = [label for label in left if abs(places[label] - found.onset) <= NEAR_RECORDS]
        if near:
            label = min(near, key=lambda label: abs(places[label] - found.onset))
            left.remove(label)
            hits.append((found, places[label]))
    return Score(
        records=len(steps),
        labelled=sum(label.wanted for label in labels),
        hits=len(hits),
        false=len(judged.spikes) - len(hits),
        delays=tuple(found.alarm - place for found, place in hits),
        confirmations=tuple(found.confirmed - place for found, place in hits),
        onset_errors=tuple(abs(found.onset - place) for found, place in hits),
    )


def total(scores: Sequence[Score]) -> Score:
    """Many curves' scores as one."""
    return Score(
        **{
            field.name: sum(values, start=type(values[0])())
            for field in dataclasses.fields(Score)
            for values in [[getattr(each, field.name) for each in scores]]
        }
    )
