"""What a replay found, as words, JSON and a picture. No torch."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.spikes import policy
from pretrain.spikes.replay.judge import Found, Judged, Label, score, total
from pretrain.spikes.replay.published_rules import RULES


def report(judged: Sequence[Judged], labels: Mapping[str, Sequence[Label]]) -> str:
    """What was found, in words and columns."""
    width = max(len(each.curve.name) for each in judged)
    lines = [f"{'curve':{width}}  records  suspicions  healed  spikes  " + "  ".join(RULES)]
    for each in judged:
        kinds = [event.kind for event in each.events]
        alarms = "  ".join(f"{len(each.rules[name]):>{len(name)}}" for name in RULES)
        lines.append(
            f"{each.curve.name:{width}}  {len(each.curve.observations):>7,}  "
            f"{kinds.count('suspect'):>10}  {kinds.count('healed'):>6}  {kinds.count('spike'):>6}  "
            f"{alarms}"
        )
    records = sum(len(each.curve.observations) for each in judged)
    confirmed = sum(len(each.spikes) for each in judged)
    lines.append(
        f"{records:,} records, {confirmed} confirmed spikes: {1e5 * confirmed / records:.2f} per "
        "100,000 records. Columns of other projects' rules count alarms, near ones once."
    )
    for each in judged:
        lines += [f"{each.curve.name}: note: {note}" for note in each.curve.notes]
        for found in each.spikes:
            lines.append(f"{each.curve.name}: {_in_words(found)}")
    if labels:
        lines += _scored(judged, labels)
    return "\n".join(lines) + "\n"


def _in_words(found: Found) -> str:
    event = found.event
    return (
        f"{event.channel} spike from step {event.onset}, confirmed at {event.step}: loss "
        f"{event.loss:.3f} over {event.baseline:.3f}; the policy would {_planned_words(found.plan)}"
    )


def _planned_words(plan: policy.Rollback | policy.GiveUp) -> str:
    if isinstance(plan, policy.GiveUp):
        return f"give up: {plan.reason}"
    words = f"go back to step {plan.step} with another seed (rung {plan.rung})"
    if plan.skip:
        words += f", skip the data of steps {plan.skip[0]} to {plan.skip[1] - 1}"
    if plan.learning_rate_steps:
        words += f", {plan.learning_rate_factor:g} x learning rate for {plan.learning_rate_steps}"
    return words


def _scored(judged: Sequence[Judged], labels: Mapping[str, Sequence[Label]]) -> list[str]:
    scores = [score(each, labels[each.curve.name]) for each in judged if each.curve.name in labels]
    whole = total(scores)
    rate = 1e5 * whole.false / max(1, whole.records)
    line = (
        f"labelled curves: {whole.hits} of {whole.labelled} found, {whole.false} false "
        f"({rate:.2f} per 100,000 records); precision {whole.precision:.2f}, recall "
        f"{whole.recall:.2f}"
    )
    if not whole.hits:
        return [line]
    return [
        line,
        f"median records from the label: {statistics.median(whole.delays):g} to the suspicion, "
        f"{statistics.median(whole.confirmations):g} to the confirmation; onset error "
        f"{statistics.median(whole.onset_errors):g}",
    ]


def as_json(judged: Sequence[Judged], labels: Mapping[str, Sequence[Label]]) -> dict[str, Any]:
    """Per curve: every event; of each spike alarm, onset, kind and plan; and what scores say."""
    result: dict[str, Any] = {}
    for each in judged:
        steps = [observation.step for observation in each.curve.observations]
        entry: dict[str, Any] = {
            "records": len(steps),
            "notes": list(each.curve.notes),
            "events": [dataclasses.asdict(event) for event in each.events],
            "spikes": [
                {
                    "alarm": steps[found.alarm],
                    "onset": found.event.onset,
                    "confirmed": found.event.step,
                    "kind": found.event.channel,
                    "plan": dataclasses.asdict(found.plan),
                }
                for found in each.spikes
            ],
            "rules": {name: [steps[i] for i in alarms] for name, alarms in each.rules.items()},
        }
        if each.curve.name in labels:
            entry["score"] = dataclasses.asdict(score(each, labels[each.curve.name]))
        result[each.curve.name] = entry
    return result


def plot(judged: Sequence[Judged], labels: Mapping[str, Sequence[Label]], path: Path) -> None:
    """Draw every curve, its suspicions, spikes and labels on one sheet."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(judged), figsize=(10, 2.6 * len(judged)), layout="constrained", squeeze=False
    )
    for axes, each in zip(grid[:, 0], judged, strict=True):
        steps = [observation.step for observation in each.curve.observations]
        losses = [observation.loss for observation in each.curve.observations]
        axes.plot(steps, losses, color="tab:blue", lw=0.6)
        for event in each.events:
            if event.kind == "healed":
                axes.axvspan(event.onset, event.step, color="tab:orange", alpha=0.4, lw=0)
            elif event.kind == "spike":
                axes.axvspan(event.onset, event.step, color="tab:red", alpha=0.4, lw=0)
                axes.axvline(event.onset, color="tab:red", lw=1)
        for label in labels.get(each.curve.name, ()):
            axes.axvline(label.onset, color="black", ls=":", lw=1)
        axes.set(title=each.curve.name, xlabel="step", ylabel="nats")
        if any(loss > 0 and math.isfinite(loss) for loss in losses):
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_title(
        f"{judged[0].curve.name}   (orange: healed; red: onset to confirmation; dotted: labels)"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
