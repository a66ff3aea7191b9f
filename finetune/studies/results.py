"""Results of a study's runs: figures by arm and seed, and differences between arms."""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
from pandas import DataFrame, Series
from scipy.stats import t

from data_prep.common.files import naming_damage
from data_prep.common.wording import count
from finetune.result import RESULT, read_result
from finetune.scores import mean
from finetune.studies.job import EVALUATION
from finetune.studies.study import Arm, Run, Study, finetuning_arms
from pretrain.records import ledger, metrics, status

LOSS, COLLAPSED = "validation loss", "collapsed"
T = TypeVar("T")
Figures = dict[str, float]
"""By name, of one arm with one seed. A loss that is not finite is inf."""
Read = dict[tuple[Arm, int], Figures]
"""By arm and seed of pretraining."""
Measured = dict[Arm, DataFrame]
"""Of each arm a row for each seed of pretraining, with a column for each figure."""


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


@dataclasses.dataclass(frozen=True)
class Results:
    """The finished runs of a study."""

    pretraining: Measured
    """Validation loss at the end, perplexities by length, accuracies of pairs."""
    finetuning: Measured
    """Of each arm with each way of fine-tuning, whose settings alone it has: the tasks' scores
    after the last epoch, and how many of the runs collapsed. A row is a seed of pretraining, with
    the means over the seeds of fine-tuning; or, in a study with one seed of pretraining, a seed of
    fine-tuning."""
    cost: Measured
    """Tokens, device hours of the steps (not of starts, evaluations and saves), tokens per second,
    spikes and rollbacks."""
    curves: dict[Arm, list[Curve]]
    """A curve a seed."""
    unfinished: list[str]
    """Runs whose training is not finished, or of which a file is damaged; how many runs have not
    begun, and how many fine-tunings of a finished run are missing."""


def collect(study: Study, runs: Sequence[Run], output: Path) -> Results:
    """Read the results of the finished runs of a study.

    Args:
        study: the study.
        runs: its runs.
        output: the folder of the runs' folders.
    """
    pretraining, finetuning, cost = Read(), Read(), Read()
    curves, unfinished = dict[Arm, list[Curve]](), list[str]()
    # An arm that lacks its first seeds keeps its place: the others are compared with the first one.
    arms = [*dict.fromkeys(run.arm for run in runs)]
    begun = [run for run in runs if (output / run.name / "run" / ledger.FILE_NAME).exists()]
    if waiting := len(runs) - len(begun):
        unfinished.append(f"{waiting} of {len(runs)} runs, which have not begun")
    for run in sorted(begun, key=lambda run: arms.index(run.arm)):
        folder = output / run.name
        try:
            seen = status.view(folder / "run")
            if seen.activity != status.FINISHED:
                unfinished.append(run.name)
                continue
            evaluated = _evaluated(folder, study.subsets)
            scores, missing = _finetuned(study, run, folder)
            curve, costs = _curve(seen), _cost(seen)
        except ValueError as error:
            unfinished.append(f"{run.name} ({error})")
            continue
        loss = _finite(curve.validation[-1] if curve.validation else None)
        pretraining[run.arm, run.seed] = {LOSS: loss, **evaluated}
        cost[run.arm, run.seed] = costs
        curves.setdefault(run.arm, []).append(curve)
        finetuning |= scores
        unfinished += [missing] if missing else []
    found = Results(table(pretraining), table(finetuning), table(cost), curves, unfinished)
    return _best(found, study.best) if study.best else found


def table(read: Read) -> Measured:
    """Arrange figures by arm and seed as tables."""
    by_arm: dict[Arm, dict[int, Figures]] = {}
    for (arm, seed), figures in read.items():
        by_arm.setdefault(arm, {})[seed] = figures
    return {arm: DataFrame.from_dict(rows, orient="index") for arm, rows in by_arm.items()}


def _curve(seen: status.RunView) -> Curve:
    tokens = [*itertools.accumulate(line["tokens"] for line in seen.lines)]
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
    lines = seen.all_lines
    ranks = {r["attempt"]: r["ranks"] for r in seen.records if r["kind"] == "attempt"}
    return {
        "tokens": sum(line["tokens"] for line in lines),
        "device hours": sum(ranks[line["attempt"]] * line["seconds"] for line in lines) / 3600,
        "tokens/s": statistics.median(line["tokens"] / line["seconds"] for line in lines),
        "spikes": len(seen.state.spikes),
        "rollbacks": len(seen.state.rollbacks),
    }


def _evaluated(folder: Path, subsets: bool) -> Figures:
    """Return what `evaluate --json` measured, with the corpus's name where there are several."""
    found = Figures()
    for path in sorted(folder.glob(f"{EVALUATION}*.json")):
        on = unquote(path.stem.removeprefix(EVALUATION).replace("-", " on ", 1))
        with naming_damage(path):
            for each in json.loads(path.read_text(encoding="utf-8")):
                perplexity = _finite(each["total"]["perplexity"])
                found[f"perplexity{on}, {each['length']:,} tokens"] = perplexity
                for name, score in each["subsets"].items() if subsets else ():
                    perplexity = _finite(score["perplexity"])
                    found[f"perplexity{on} on {name}, {each['length']:,} tokens"] = perplexity
                for name, score in each.get("pairs", {}).items():
                    found[f"{name} accuracy{on}"] = score["accuracy"]
    return found


def _finetuned(study: Study, run: Run, folder: Path) -> tuple[Read, str]:
    """Return the figures of a run's fine-tunings, and how many of these are missing; "": none."""
    found, finished, ways = Read(), 0, finetuning_arms(study, run.arm)
    seeds = study.finetune.seeds_by_task if study.finetune else {}
    wanted = len(ways) * sum(seeds.values())
    for way in ways:
        if scores := _scores(folder / "scores" / way.folder):
            finished += sum(len(figures) - 1 for figures in scores.values())  # but `COLLAPSED`
            both = Arm((*run.arm.levels, *way.levels), way.settings)
            by_seed = DataFrame.from_dict(scores, orient="index")
            if len(study.seeds) > 1:
                # Means over different seeds would differ even between equal models.
                is_whole = [by_seed[name].count() == seeds.get(name) for name in by_seed]
                means = by_seed.mean().where(is_whole)
                scores = {run.seed: {**means, COLLAPSED: by_seed[COLLAPSED].sum()}}
            found |= {(both, seed): figures for seed, figures in scores.items()}
    missing = f"{wanted - finished} of {count(wanted, 'fine-tuning')} of {run.name}"
    return found, missing if finished < wanted else ""


def _scores(folder: Path) -> dict[int, Figures]:
    """Return by seed the last scores of each task, and the number of runs that ended collapsed.

    A run that collapsed counts with its score.
    """
    found: dict[int, Figures] = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        result = read_result(path.parent)
        plan, last = result["plan"], result["last"]
        figures = found.setdefault(plan.seed, {})
        figures[plan.task] = 100 * mean(last, plan.definition.official)
        figures[COLLAPSED] = figures.get(COLLAPSED, 0.0) + last["collapsed"]
    return found


def _finite(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _best(found: Results, factor: str) -> Results:
    """Keep, of each group of arms that differ only in a factor, the one with the lowest loss.

    The mean over the seeds decides.
    """
    best: dict[frozenset[tuple[str, str]], Arm] = {}
    for arm in sorted(found.pretraining, key=lambda arm: found.pretraining[arm][LOSS].mean()):
        best.setdefault(frozenset(each for each in arm.levels if each[0] != factor), arm)

    def kept(measured: dict[Arm, T]) -> dict[Arm, T]:
        """Return the best arms, each with every way of fine-tuning."""
        levels = [{*arm.levels} for arm in best.values()]
        return {a: v for a, v in measured.items() if any(each <= {*a.levels} for each in levels)}

    pretraining, finetuning, cost = map(kept, (found.pretraining, found.finetuning, found.cost))
    return Results(pretraining, finetuning, cost, kept(found.curves), found.unfinished)


def paired(measured: Measured, one: Arm, other: Arm) -> DataFrame:
    """Compare the figures of two arms over the seeds that both have.

    Runs of one seed see the same text in the same order, with the same tokens hidden.

    Returns:
        For each figure `seeds`, `mean` (other minus one) and `half_width`, of the 95 % interval by
        Student's t over the seeds; NaN with one seed, and where all differences are equal, as
        those of models that give one answer to everything.
    """
    deltas = measured[other] - measured[one]
    seeds = deltas.count()
    half_width = t.ppf(0.975, seeds - 1) * deviation(deltas) / seeds**0.5
    half_width = half_width.where(deltas.nunique() > 1)
    return DataFrame({"seeds": seeds, "mean": deltas.mean(), "half_width": half_width})


def deviation(values: Series | DataFrame) -> Any:  # noqa: ANN401 - a number or a Series
    """Return standard deviations of samples; NaN where a value is inf, of a run that diverged."""
    with np.errstate(invalid="ignore"):
        return values.std()


def names_of(measured: Measured) -> list[str]:
    """Return the names of all figures, in the order in which they were measured."""
    return [*dict.fromkeys(name for frame in measured.values() for name in frame.columns)]
