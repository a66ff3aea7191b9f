"""Whether one model is better than another: a paired bootstrap over seeds and examples.

Both models have the same seeds and answer the same examples. Each resample draws seeds and examples
with replacement, the same for both models (Koehn 2004; over seeds: Sellam et al. 2022, the
multi-bootstrap), and the share of resamples in which the better one is not better is half the
p-value. With one seed it says nothing about other seeds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.common.files import strict_json, write_atomically
from finetune.scores import mean, score
from finetune.task import Task, suffix_of

PREDICTIONS = "predictions.jsonl"
RESAMPLES = 1000
Predictions = Mapping[str, tuple[Any, Any]]
"""By dev split: the right answers and those of the kept model, in the form that scores take."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The task's score of one model minus that of another."""

    seeds: int
    ours: float
    """Mean over the seeds."""
    theirs: float
    low: float
    """The difference that 2.5 % of the resamples are below."""
    high: float
    p_value: float
    """Two-sided, and at least 2 / RESAMPLES."""


def write(folder: Path, predictions: Predictions) -> None:
    """Write the predictions into a run's folder, a line for each split."""
    lines = [
        strict_json({"split": split, "truth": _listed(truth), "answers": _listed(answers)})
        for split, (truth, answers) in predictions.items()
    ]
    write_atomically(folder / PREDICTIONS, "".join(f"{line}\n" for line in lines).encode())


def read_predictions(folder: Path, task: Task) -> Predictions:
    """Read the predictions of a run.

    Raises:
        ValueError: the run has none.
    """
    path = folder / PREDICTIONS
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: has no {PREDICTIONS}, which newer runs have; do the run again"
        ) from None
    return {
        line["split"]: (_array(task, line["truth"]), _array(task, line["answers"]))
        for line in lines
    }


def compare(task: Task, ours: Sequence[Predictions], theirs: Sequence[Predictions]) -> Difference:
    """Compare two models on a task.

    Args:
        task: both models'.
        ours: predictions by seed.
        theirs: of the same seeds, in the same order.

    Raises:
        ValueError: the examples differ.
    """
    first = ours[0]
    for other in (*ours, *theirs):
        if {s: _listed(t) for s, (t, _) in other.items()} != {
            s: _listed(t) for s, (t, _) in first.items()
        }:
            raise ValueError(f"{task.name}: the models were scored on different examples")
    generator = np.random.default_rng(0)
    sizes = {split: len(truth) for split, (truth, _) in first.items()}
    everything = {split: np.arange(size) for split, size in sizes.items()}
    whole = [_mean_score(task, each, range(len(ours)), everything) for each in (ours, theirs)]
    differences = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        seeds = generator.integers(len(ours), size=len(ours)).tolist()
        drawn = {split: generator.integers(size, size=size) for split, size in sizes.items()}
        resampled = [_mean_score(task, each, seeds, drawn) for each in (ours, theirs)]
        differences[number] = resampled[0] - resampled[1]
    low, high = np.quantile(differences, (0.025, 0.975)).tolist()
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    p_value = min(1.0, 2 * max(1, int(beyond)) / RESAMPLES)
    return Difference(len(ours), whole[0], whole[1], low, high, p_value)


def _mean_score(
    task: Task,
    runs: Sequence[Predictions],
    seeds: Sequence[int],
    drawn: Mapping[str, npt.NDArray[np.int64]],
) -> float:
    """Return the task's score on the drawn examples, averaged over the drawn seeds."""
    by_seed = {seed: _score(task, runs[seed], drawn) for seed in set(seeds)}
    return math.fsum(by_seed[seed] for seed in seeds) / len(seeds)


def _score(task: Task, run: Predictions, drawn: Mapping[str, npt.NDArray[np.int64]]) -> float:
    found = dict[str, float]()
    for split, (truth, answers) in run.items():
        wanted = [name for name in task.metrics if f"{name}{suffix_of(split)}" in task.official]
        chosen = (_take(values, drawn[split]) for values in (truth, answers))
        for name, value in score(wanted, *chosen).items():
            found[f"{name}{suffix_of(split)}"] = value
    return mean(found, task.official)


def _take(values: Any, chosen: npt.NDArray[np.int64]) -> Any:  # noqa: ANN401 - see Predictions
    return values[chosen] if isinstance(values, np.ndarray) else [values[n] for n in chosen]


def _listed(values: Any) -> list[Any]:  # noqa: ANN401 - see Predictions
    """Return JSON's form, which has null for a number that is not finite."""
    if not isinstance(values, np.ndarray):
        return [list(v) if isinstance(v, tuple) else v for v in values]
    if values.dtype.kind != "f":
        return list(values.tolist())
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _array(task: Task, values: list[Any]) -> Any:  # noqa: ANN401 - see Predictions
    if task.kind in ("tags", "spans"):
        return values
    return np.array([math.nan if value is None else value for value in values])
