"""The results of a folder's runs, and their medians and spreads by task and kind of weights.

`collect` reads the results, `protocols.choose` leaves those with the best settings of each search,
and `summary` groups them into rows. Medians include collapsed runs; a further row leaves them out,
with the first retry that did not collapse in place of each.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.arguments import typed
from data_prep.common.files import strict_json, write_atomically
from finetune import benchmarks, protocols
from finetune.plan import RESULT, WEIGHTS
from finetune.planning import result_of
from finetune.protocols import Protocol
from finetune.scores import mean
from finetune.task import Task

RESULTS = "results.jsonl"
MAJORITY = "majority"
WITHOUT = "pretrained, without collapsed"
Result = Mapping[str, Any]
"""The content of result.json."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """One score of several seeds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Row:
    """The runs of one task that started from the same kind of weights; scores by name."""

    task: Task
    runs: int
    best: Mapping[str, Spread]
    """In each run's best epoch, selected on the same dev split as `best_epoch_by` says."""
    last: Mapping[str, Spread]
    """After each run's last epoch, without selection."""
    reported: Spread
    """The score that the protocol reports."""
    combined: float
    """That score over all seeds, as the protocol combines them."""
    collapsed: int = 0
    """Number of collapsed runs, which are among the scores."""
    scores: tuple[float, ...] = ()
    """The task's score in each run's best epoch: the mean of its official ones."""


Tables = Mapping[str, Mapping[str, Row]]
"""Rows by task and kind of weights (see `summary`)."""


def collect(folder: Path) -> list[dict[str, Any]]:
    """Read every finished run's result, with its folder's name, and write all to results.jsonl.

    Raises:
        ValueError: there is no finished run.
    """
    paths = sorted(folder.glob(f"*/{RESULT}"))
    if not paths:
        raise ValueError(f"{folder}: has no finished run of `{typed('finetune glue')}`")
    results = [result_of(path.parent) | {"folder": path.parent.name} for path in paths]
    lines = "".join(strict_json(result) + "\n" for result in results)
    write_atomically(folder / RESULTS, lines.encode())
    return results


def summary(results: Sequence[Result]) -> dict[str, dict[str, Row]]:
    """Group scores by task and by the weights that the runs started from.

    The runs of a search have one setting (`protocols.choose`).

    The rows of a task are "pretrained", `WITHOUT` if some pretrained runs collapsed but not all,
    "random", each if it has runs, and `MAJORITY`, the best constant answer.
    """
    tables: dict[str, dict[str, Row]] = {}
    protocol = protocols.of_results(results)
    for name, task in tasks_of(results).items():
        runs = [result for result in results if result["task"] == name]
        rows = {}
        for weights in WEIGHTS:
            first = [r for r in runs if r["weights"] == weights and r["retry"] == 0]
            if first:
                rows[weights] = _row(first, task, protocol)
            succeeded = _succeeded(runs) if weights == "pretrained" else []
            if succeeded and any(run["collapsed"] for run in first):
                rows[WITHOUT] = _row(succeeded, task, protocol)
        constant = {name: Spread.of([value]) for name, value in runs[0]["majority"].items()}
        value = mean(runs[0]["majority"], protocol.scores(task))
        row = Row(task, 0, constant, constant, Spread.of([value]), value)
        tables[name] = {**rows, MAJORITY: row}
    return tables


def tasks_of(results: Sequence[Result]) -> dict[str, Task]:
    """Return the tasks of results by name, the benchmarks' first, in their order."""
    found = {result["task"]: benchmarks.of_result(result) for result in results}
    return {name: found[name] for name in [*benchmarks.TASKS, *sorted(found)] if name in found}


def _succeeded(runs: Sequence[Result]) -> list[Result]:
    """Return the first pretrained run of each seed that did not collapse, if there is one."""
    by_seed: dict[int, Result] = {}
    for run in sorted(runs, key=lambda run: int(run["retry"])):
        if run["weights"] == "pretrained" and not run["collapsed"]:
            by_seed.setdefault(run["seed"], run)
    return list(by_seed.values())


def _row(runs: Sequence[Result], task: Task, protocol: Protocol) -> Row:
    best, last = (
        {name: Spread.of([run[when][name] for run in runs]) for name in task.score_names}
        for when in ("best", "last")
    )
    values = [protocol.score(run, task) for run in runs]
    combined = protocol.combined(values, task)
    collapsed = sum(bool(run["collapsed"]) for run in runs)
    official = tuple(mean(run["best"], task.official) for run in runs)
    return Row(task, len(runs), best, last, Spread.of(values), combined, collapsed, official)
