"""Report the detections on recorded curves as text, JSON and a figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(found), figsize=(10, 2.6 * len(found)), layout="constrained", squeeze=False
    )
    for axes, each in zip(grid[:, 0], found, strict=True):
        steps = [observation.step for observation in each.curve.observations]
        losses = [observation.loss for observation in each.curve.observations]
        axes.plot(steps, losses, color="tab:blue", lw=0.6)
        for event in each.events:
            if event.kind == "healed":
                axes.axvspan(event.onset, event.step, color="tab:orange", alpha=0.4, lw=0)
            elif event.kind == "new-level":
                axes.axvspan(event.onset, event.step, color="tab:green", alpha=0.4, lw=0)
            elif event.kind == "spike":
                axes.axvspan(event.onset, event.step, color="tab:red", alpha=0.4, lw=0)
                axes.axvline(event.onset, color="tab:red", lw=1)
        axes.set(title=each.curve.name, xlabel="step", ylabel="nats")
        if any(loss > 0 and math.isfinite(loss) for loss in losses):
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_title(f"{found[0].curve.name}   (orange: healed; green: new level; red: spike)")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
