"""What the runs of a study measured: figures by arm and seed, and what differs between arms."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from finetune.runs import RESULT, read_result, task_of
from finetune.scores import mean
from finetune.studies.study import Arm, Run, Study, comparisons, finetuning_arms
from pretrain.records import ledger, metrics, status

LOSS = "validation loss"
T = TypeVar("T")
Figures = dict[str, float]
"""By name, of one arm with one seed."""
Measured = dict[Arm, dict[int, Figures]]
"""By arm and seed of pretraining."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """The surviving steps of a run."""

    tokens: list[int]
    """Read by all ranks up to and with each step."""
    losses: list[float]
    """Of training, NaN where one was not finite."""
    measured_at: list[int]
    """Tokens read before each evaluation."""
    validation: list[float]

    def tokens_to(self, loss: float) -> float:
        """Return the tokens after which the validation loss is `loss`; inf if it never is.

        Between two evaluations it is interpolated.
        """
        points = list(zip(self.measured_at, self.validation, strict=True))
        for (x, y), (to_x, to_y) in zip(points[:1] + points, points, strict=False):
            if to_y <= loss:
                return to_x - (to_x - x) * (loss - to_y) / (y - to_y) if y > to_y else to_x
        return math.inf


@dataclasses.dataclass(frozen=True)
class Results:
    """The runs of a study that have begun."""

    pretraining: Measured
    """Validation loss at the end, perplexities by length, accuracies of pairs."""
    finetuning: Measured
    """Of each arm with each way of fine-tuning: the tasks' scores after the last epoch, the mean
    over the seeds of fine-tuning; and how many of these runs collapsed."""
    cost: Measured
    """Tokens, device hours of the steps (not of starts, evaluations and saves), tokens per second,
    spikes and rollbacks."""
    curves: dict[Arm, dict[int, Curve]]
    unfinished: list[str]
    """Runs whose training has not come to its end, or whose ledger does not verify."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A figure of one arm minus that of another with the same seeds."""

    seeds: int
    mean: float
    half_width: float
    """Of the 95 % interval by Student's t over the seeds; NaN with one seed."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half_width


def collect(study: Study, runs: Sequence[Run], output: Path) -> Results:
    """Read what is there of the runs of a study.

    Args:
        study: the study.
        runs: its runs.
        output: the folder of the runs' folders.
    """
    found = Results({}, {}, {}, {}, [])
    # An arm that lacks its first seeds keeps its place: the others are compared with the first one.
    arms = [*dict.fromkeys(run.arm for run in runs)]
    for run in sorted(runs, key=lambda run: arms.index(run.arm)):
        folder = output / run.name
        if not (folder / "run" / ledger.FILE_NAME).exists():  # not begun
            continue
        try:
            seen = status.view(folder / "run")
        except ValueError as error:
            found.unfinished.append(f"{run.name} ({error})")
            continue
        if seen.activity != status.FINISHED:
            found.unfinished.append(run.name)
            continue
        curve = _curve(seen)
        figures = {LOSS: curve.validation[-1] if curve.validation else math.nan}
        figures |= _evaluated(folder / "evaluation.json")
        found.pretraining.setdefault(run.arm, {})[run.seed] = figures
        found.cost.setdefault(run.arm, {})[run.seed] = _cost(seen)
        found.curves.setdefault(run.arm, {})[run.seed] = curve
        for way in finetuning_arms(study):
            if scores := _scores(folder / "scores" / (way.folder or "all")):
                both = Arm((*run.arm.levels, *way.levels), {**run.arm.settings, **way.settings})
                found.finetuning.setdefault(both, {})[run.seed] = scores
    return _best(found, study.best) if study.best else found


def _curve(seen: status.RunView) -> Curve:
    tokens, read = list[int](), 0
    for line in seen.lines:
        read += line["tokens"]
        tokens.append(read)
    steps = {line["step"]: total for line, total in zip(seen.lines, tokens, strict=True)}
    measured = [line for line in seen.validation if line["step"] - 1 in steps]
    return Curve(
        tokens,
        [metrics.loss_of(line) for line in seen.lines],
        [steps[line["step"] - 1] for line in measured],
        [metrics.loss_of(line) for line in measured],
    )


def _cost(seen: status.RunView) -> Figures:
    """Return the cost of a run; its abandoned steps count."""
    lines = metrics.read_metrics(seen.folder / metrics.METRICS)
    ranks = {r["attempt"]: r["ranks"] for r in seen.records if r["kind"] == "attempt"}
    return {
        "tokens": sum(line["tokens"] for line in lines),
        "device hours": sum(ranks[line["attempt"]] * line["seconds"] for line in lines) / 3600,
        "tokens/s": statistics.median(line["tokens"] / line["seconds"] for line in lines),
        "spikes": len(seen.state.spikes),
        "rollbacks": len(seen.state.rollbacks),
    }


def _evaluated(path: Path) -> Figures:
    """Return what `evaluate --json` measured."""
    if not path.exists():
        return {}
    found = Figures()
    for each in json.loads(path.read_text(encoding="utf-8")):
        found[f"perplexity, {each['length']:,} tokens"] = _number(each["total"]["perplexity"])
        for name, score in each.get("pairs", {}).items():
            found[f"{name} accuracy"] = _number(score["accuracy"])
    return found


def _scores(folder: Path) -> Figures:
    """Return the scores of each task, and the number of runs that collapsed.

    A run that collapsed counts with its score.
    """
    by_task: dict[str, list[float]] = {}
    collapsed = 0
    for path in sorted(folder.glob(f"*/{RESULT}")):
        result = read_result(path.parent)
        score = mean(result["last"], task_of(result["plan"]).official)
        by_task.setdefault(result["task"], []).append(100 * score)
        collapsed += bool(result["collapsed"])
    found = {task: statistics.fmean(scores) for task, scores in by_task.items()}
    return {**found, "collapsed": float(collapsed)} if found else {}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _best(found: Results, factor: str) -> Results:
    """Leave of each group of arms that differ in a factor alone the one with the lowest loss.

    It is the mean over the seeds that counts.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Arm]] = {}
    for arm in found.pretraining:
        others = tuple(level for level in arm.levels if level[0] != factor)
        groups.setdefault(others, []).append(arm)

    def loss(arm: Arm) -> float:
        losses = [figures[LOSS] for figures in found.pretraining[arm].values()]
        average = statistics.fmean(losses)
        return math.inf if math.isnan(average) else average

    best = [set(min(group, key=loss).levels) for group in groups.values()]

    def kept(measured: dict[Arm, T]) -> dict[Arm, T]:
        return {
            arm: each for arm, each in measured.items() if any(b <= {*arm.levels} for b in best)
        }

    return Results(
        kept(found.pretraining),
        kept(found.finetuning),
        kept(found.cost),
        kept(found.curves),
        found.unfinished,
    )


def paired(measured: Measured, name: str, one: Arm, other: Arm) -> Difference | None:
    """Compare a figure of two arms over the seeds that both have; None without any.

    Runs of one seed see the same text in the same order, with the same tokens hidden.
    """
    from scipy.stats import t

    ours, theirs = measured[one], measured[other]
    deltas = [
        theirs[seed][name] - ours[seed][name]
        for seed in sorted(ours.keys() & theirs.keys())
        if name in ours[seed] and name in theirs[seed]
    ]
    if not deltas:
        return None
    half_width = math.nan
    if len(deltas) > 1:
        error = deviation(deltas) / math.sqrt(len(deltas))
        half_width = float(t.ppf(0.975, len(deltas) - 1)) * error
    return Difference(len(deltas), statistics.fmean(deltas), half_width)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; NaN if one is NaN, of a run that diverged."""
    return float(np.std(values, ddof=1))  # statistics.stdev raises


def tokens_to_its_loss(
    curves: Mapping[Arm, Mapping[int, Curve]], one: Arm, other: Arm
) -> list[float]:
    """Return by seed the share of its tokens that `other` needs to reach `one`'s last loss."""
    ours, theirs = curves[one], curves[other]
    return [
        theirs[seed].tokens_to(ours[seed].validation[-1]) / ours[seed].measured_at[-1]
        for seed in sorted(ours.keys() & theirs.keys())
        if ours[seed].validation and theirs[seed].validation
    ]


def compared(measured: Measured, factor: str = "") -> list[tuple[Arm, Arm]]:
    """Return the pairs of arms to compare; the levels of `factor` do not tell arms apart.

    Args:
        measured: figures by arm.
        factor: one whose best level alone is left.
    """
    if not factor:
        return comparisons([*measured])
    plain = {
        dataclasses.replace(
            arm, levels=tuple(each for each in arm.levels if each[0] != factor)
        ): arm
        for arm in measured
    }
    return [(plain[one], plain[other]) for one, other in comparisons([*plain])]


def names_of(measured: Mapping[Arm, Mapping[int, Figures]]) -> list[str]:
    """Return the names of all figures, in the order in which they were measured."""
    found: dict[str, None] = {}
    for by_seed in measured.values():
        for figures in by_seed.values():
            found |= dict.fromkeys(figures)
    return [*found]
