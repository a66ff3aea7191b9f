"""Report the detections on recorded curves as text, JSON and a figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.common import pictures
from pretrain.spikes import policy
from pretrain.spikes.replay.detect import ConfirmedSpike, Detections


def report(found: Sequence[Detections]) -> str:
    """Format the detections on several curves as text."""
    width = max(len(each.curve.name) for each in found)
    lines = [f"{'curve':{width}}  records  suspicions  healed  new levels  spikes"]
    for each in found:
        kinds = [event.kind for event in each.events]
        lines.append(
            f"{each.curve.name:{width}}  {len(each.curve.observations):>7,}  "
            f"{kinds.count('suspect'):>10}  {kinds.count('healed'):>6}  "
            f"{kinds.count('new-level'):>10}  {kinds.count('spike'):>6}"
        )
    records = sum(len(each.curve.observations) for each in found)
    confirmed = sum(len(each.spikes) for each in found)
    lines.append(
        f"{records:,} records, {confirmed} confirmed spikes: {1e5 * confirmed / records:.2f} per "
        "100,000 records"
    )
    for each in found:
        lines += [f"{each.curve.name}: note: {note}" for note in each.curve.notes]
        lines += [f"{each.curve.name}: {_describe(spike)}" for spike in each.spikes]
    return "\n".join(lines) + "\n"


def _describe(spike: ConfirmedSpike) -> str:
    event, plan = spike.event, spike.plan
    text = (
        f"{event.channel} spike from step {event.onset}, confirmed at {event.step}: loss "
        f"{event.loss:.3f} over {event.baseline:.3f}; the policy would "
    )
    if isinstance(plan, policy.GiveUp):
        return f"{text}give up: {plan.reason}"
    text += f"go back to step {plan.step} with another seed (rung {plan.rung})"
    if plan.skip:
        text += f", skip the data of steps {plan.skip[0]} to {plan.skip[1] - 1}"
    if plan.learning_rate_steps:
        text += f", {plan.learning_rate_factor:g} x learning rate for {plan.learning_rate_steps}"
    return text


def as_json(found: Sequence[Detections]) -> dict[str, Any]:
    """Every event of each curve, and its spikes with their plans, for JSON."""
    result: dict[str, Any] = {}
    for each in found:
        steps = [observation.step for observation in each.curve.observations]
        result[each.curve.name] = {
            "records": len(steps),
            "notes": list(each.curve.notes),
            "events": [dataclasses.asdict(event) for event in each.events],
            "spikes": [
                {
                    "alarm": steps[spike.alarm],
                    "onset": spike.event.onset,
                    "confirmed": spike.event.step,
                    "kind": spike.event.channel,
                    "plan": dataclasses.asdict(spike.plan),
                }
                for spike in each.spikes
            ],
        }
    return result


def plot(found: Sequence[Detections], path: Path) -> None:
    """Draw every curve with its suspicions and spikes."""
    colors = {"healed": pictures.ORANGE, "new-level": pictures.GREEN, "spike": pictures.RED}
    with pictures.picture(path, 10, 0.6 + 2.4 * len(found)) as figure:
        grid = figure.subplots(len(found), squeeze=False)[:, 0]
        for axes, each in zip(grid, found, strict=True):
            steps = [observation.step for observation in each.curve.observations]
            losses = [observation.loss for observation in each.curve.observations]
            axes.plot(steps, losses, lw=0.6)
            for event in each.events:
                if color := colors.get(event.kind):
                    axes.axvspan(
                        event.onset, event.step, color=color, alpha=0.4, lw=1, label=event.kind
                    )
            axes.set(title=each.curve.name, ylabel="nats")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            if any(loss > 0 and math.isfinite(loss) for loss in losses):
                axes.set_yscale("log")
                pictures.plain_numbers(axes.yaxis)
        grid[-1].set_xlabel("step")
        pictures.legend_below(figure, columns=4)
