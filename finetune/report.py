"""What the runs of a folder come to: median and spread over seeds, beside the majority class."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.files import write_atomically
from finetune import glue
from finetune.acceptability import PROVENANCE
from finetune.config import RESULT, WEIGHTS

RESULTS = "results.jsonl"
REPORT = "report.md"
MAJORITY = "majority"


@dataclasses.dataclass(frozen=True)
class Spread:
    """One score over several seeds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Row:
    """The runs of one task that began with the same kind of weights; scores by metric."""

    runs: int
    best: Mapping[str, Spread]
    """In each run's best epoch, chosen on the same dev split by the task's first metric."""
    last: Mapping[str, Spread]
    """After each run's last epoch: nothing chosen."""


def collect(folder: Path) -> list[dict[str, Any]]:
    """Every finished run's result, and all of them in results.jsonl, a line each.

    Raises:
        ValueError: there is no finished run.
    """
    paths = sorted(folder.glob(f"*/{RESULT}"))
    if not paths:
        raise ValueError(
            f"{folder}: has no finished run; accepted: the --output of `python -m finetune glue`"
        )
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    lines = "".join(json.dumps(result) + "\n" for result in results)
    write_atomically(folder / RESULTS, lines.encode())
    return results


def summary(folder: Path) -> dict[str, dict[str, Row]]:
    """Scores by task and by weights: "pretrained", "random" (those there are) and "majority".

    Raises:
        ValueError: there is no finished run.
    """
    return _summary(collect(folder))


def write_report(folder: Path) -> str:
    """The table as Markdown, also written to report.md.

    Raises:
        ValueError: there is no finished run.
    """
    results = collect(folder)
    parts = [
        _section(task, rows, next(r for r in results if r["task"] == task))
        for task, rows in _summary(results).items()
    ]
    text = "\n".join(parts)
    write_atomically(folder / REPORT, text.encode())
    return text


def _summary(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Row]]:
    tables: dict[str, dict[str, Row]] = {}
    for task in dict.fromkeys(result["task"] for result in results):
        runs = [result for result in results if result["task"] == task]
        rows = {
            weights: _row([run for run in runs if run["weights"] == weights], task)
            for weights in WEIGHTS
            if any(run["weights"] == weights for run in runs)
        }
        majority = {name: Spread.of([value]) for name, value in runs[0]["majority"].items()}
        tables[task] = {**rows, MAJORITY: Row(0, majority, majority)}
    return tables


def _row(runs: Sequence[dict[str, Any]], task: str) -> Row:
    best, last = (
        {name: Spread.of([run[when][name] for run in runs]) for name in glue.find(task).metrics}
        for when in ("best", "last")
    )
    return Row(len(runs), best, last)


def _section(task: str, rows: Mapping[str, Row], example: dict[str, Any]) -> str:
    metrics = glue.find(task).metrics
    head = ["weights", "seeds", *(f"{m}, {when}" for when in ("best", "last") for m in metrics)]
    lines = [f"## {task}", "", _line(head), _line(["---"] * len(head))]
    for weights, row in rows.items():
        spreads = [scores[m] for scores in (row.best, row.last) for m in metrics]
        name = "majority class" if weights == MAJORITY else weights
        lines.append(_line([name, str(row.runs or ""), *(_cell(s) for s in spreads)]))
    lines += [
        "",
        f"Median over seeds (lowest to highest) on {example['dev_examples']:,} dev sentences after "
        f"training on {example['train_examples']:,}. *best*: the epoch with the highest "
        f"{metrics[0]} on the same dev sentences, as the original reports it; it flatters. *last*: "
        "the last epoch, nothing chosen.",
    ]
    provenance = Path(example["plan"]["data"]) / task / PROVENANCE
    if provenance.is_file():
        made = json.loads(provenance.read_text(encoding="utf-8"))["made"]
        lines.append(f"\nThe data is not the benchmark's: {made}.")
    return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(spread: Spread) -> str:
    if spread.lowest == spread.highest:
        return f"{spread.median:.4f}"
    return f"{spread.median:.4f} ({spread.lowest:.4f} to {spread.highest:.4f})"
