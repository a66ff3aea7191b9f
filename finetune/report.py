"""The report of a folder's runs: medians and spreads beside the published table.

`collect` reads the results, `summary` groups them into rows by task and kind of weights, and
`write_report` writes them as report.md and report.csv. Medians include collapsed runs; a further
row leaves them out.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.arguments import as_invoked
from data_prep.common.files import strict_json, write_atomically
from data_prep.common.markup import markdown_table
from finetune.protocols import COLUMNS, PROTOCOLS, Protocol
from finetune.runs import RESULT, WEIGHTS, read_result, task_of
from finetune.scores import LOWER_IS_BETTER
from finetune.tasks import TASKS, Task

REPORT = "report.md"
TABLE = "report.csv"
RESULTS = "results.jsonl"
CONSTANT = "constant"
UNCOLLAPSED = "pretrained, without collapsed"
CONSTANT_TITLE = "best constant answer"
"""Title of the row of the best constant answer, which for STS-B is the mean and not a class."""
AS_PUBLISHED = "best by this score"
"""The epoch of the scores in report.csv that compare with published ones."""
Result = Mapping[str, Any]
"""The content of result.json."""


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, lowest and highest of one score of several seeds."""
    return statistics.median(values), min(values), max(values)


@dataclasses.dataclass(frozen=True)
class TaskScores:
    """The runs of one task that started from the same kind of weights; scores by name and seed."""

    task: Task
    runs: int
    best: Mapping[str, Sequence[float]]
    """In each run's best epoch, selected on the same dev split as `best_epoch_by` says."""
    last: Mapping[str, Sequence[float]]
    """After each run's last epoch, without selection."""
    reported: Sequence[float]
    """The score that the protocol reports."""
    collapsed: int = 0
    """Number of collapsed runs, which are among the scores."""


Tables = Mapping[str, Mapping[str, TaskScores]]
"""Rows by task and kind of weights (see `summary`)."""


def write_report(folder: Path) -> str:
    """Return the report as Markdown, and write report.md, report.csv and results.jsonl.

    Raises:
        ValueError: there is no finished run.
    """
    results = collect(folder)
    lines = "".join(strict_json(result) + "\n" for result in results)
    write_atomically(folder / RESULTS, lines.encode())
    protocol = PROTOCOLS[results[0]["plan"]["protocol"]]  # all runs of a folder have the same
    tables = summary(results)
    named = {task: rows for task, rows in tables.items() if task in TASKS}
    overview = [_published_table(named, protocol), _official_table(named)] if named else []
    sections = [
        _section(rows, [result for result in results if result["task"] == task])
        for task, rows in tables.items()
    ]
    text = "\n".join([*overview, *sections])
    write_atomically(folder / REPORT, text.encode())
    write_atomically(folder / TABLE, _csv(tables, protocol).encode())
    return text


def collect(folder: Path) -> list[dict[str, Any]]:
    """Read every finished run's result, with its folder's name.

    Raises:
        ValueError: there is no finished run.
    """
    paths = sorted(folder.glob(f"*/{RESULT}"))
    if not paths:
        raise ValueError(f"{folder}: has no finished run of `{as_invoked('finetune glue')}`")
    return [read_result(path.parent) | {"folder": path.parent.name} for path in paths]


def summary(results: Sequence[Result]) -> dict[str, dict[str, TaskScores]]:
    """Group scores by task, GLUE's first, and by the weights that the runs started from.

    The rows of a task are "pretrained" and "random", if they have runs, `UNCOLLAPSED` if some but
    not all pretrained runs collapsed, and `CONSTANT`, the best constant answer.
    """
    tables: dict[str, dict[str, TaskScores]] = {}
    protocol = PROTOCOLS[results[0]["plan"]["protocol"]]
    found = {result["task"]: task_of(result["plan"]) for result in results}
    order = dict.fromkeys([*TASKS, *sorted(found)])
    for task in [found[name] for name in order if name in found]:
        runs = [result for result in results if result["task"] == task.name]
        rows = {}
        for weights in WEIGHTS:
            own = [run for run in runs if run["weights"] == weights]
            if own:
                rows[weights] = _row(own, task, protocol)
            succeeded = [run for run in own if not run["collapsed"]]
            if weights == "pretrained" and 0 < len(succeeded) < len(own):
                rows[UNCOLLAPSED] = _row(succeeded, task, protocol)
        constant = {name: [value] for name, value in runs[0]["constant"].items()}
        rows[CONSTANT] = TaskScores(task, 0, constant, constant, constant[protocol.metric(task)])
        tables[task.name] = rows
    return tables


def _row(runs: Sequence[Result], task: Task, protocol: Protocol) -> TaskScores:
    best, last = (
        {name: [run[when][name] for run in runs] for name in task.score_names}
        for when in ("best", "last")
    )
    reported = [protocol.score(run, task) for run in runs]
    return TaskScores(
        task, len(runs), best, last, reported, sum(bool(run["collapsed"]) for run in runs)
    )


def _published_table(tables: Tables, protocol: Protocol) -> str:
    rows = dict(protocol.table)
    for weights, scored in _by_weights(tables):
        rows[CONSTANT_TITLE if weights == CONSTANT else f"**ours**, {weights}"] = {
            task: _as_printed(row, protocol)
            + (f" ({row.collapsed} of {row.runs})" if row.collapsed else "")
            for task, row in scored.items()
        }
    notes = (
        f"Protocol {protocol.name}, after {protocol.source}. Ours: median over seeds, with the "
        "number of collapsed runs in brackets. On dev, each run in the epoch where it is best, "
        "which is selected on the same examples, so the scores are optimistic: "
        f"{protocol.scores_in_words}."
    )
    if any("*" in cell for row in protocol.table.values() for cell in row.values()):
        notes += " * no better than a constant answer, as a collapsed run is."
    return _section_of("Beside the published scores", ["model", *COLUMNS], rows, notes)


def _as_printed(row: TaskScores, protocol: Protocol) -> str:
    """Return what the protocol reports, in the units of its table."""
    value = statistics.median(row.reported)
    is_loss = protocol.metric(row.task) in LOWER_IS_BETTER
    return f"{value:.3f}" if is_loss else f"{100 * value:.1f}"


def _official_table(tables: Tables) -> str:
    """Return the benchmark's scores: the mean of each task's official ones (Wang et al. 2019)."""
    rows: dict[str, dict[str, str]] = {}
    for weights, scored in _by_weights(tables):
        scores = {
            task: 100 * statistics.fmean(statistics.median(row.best[n]) for n in row.task.official)
            for task, row in scored.items()
        }
        rows[CONSTANT_TITLE if weights == CONSTANT else weights] = {
            **{task: f"{value:.1f}" for task, value in scores.items()},
            "mean": f"{statistics.fmean(scores.values()):.1f} of {len(scores)}",
        }
    return _section_of(
        "The benchmark's own scores",
        ["weights", *TASKS, "mean"],
        rows,
        "On dev, in per cent, in the epoch whose model is kept: Matthews correlation for CoLA, "
        "mean of accuracy and F1 for MRPC and QQP, mean of Pearson and Spearman for STS-B, mean of "
        "matched and mismatched accuracy for MNLI, else accuracy; the mean is over the tasks that "
        "were run.",
    )


def _by_weights(tables: Tables) -> Iterator[tuple[str, dict[str, TaskScores]]]:
    """Yield each kind of weights with its rows by task, if it has any.

    `UNCOLLAPSED` needs a collapsed run in some task, and includes tasks in which none collapsed.
    """
    pretrained = {task: rows["pretrained"] for task, rows in tables.items() if "pretrained" in rows}
    some_collapsed = any(row.collapsed for row in pretrained.values())
    for weights in ("pretrained", UNCOLLAPSED, "random", CONSTANT):
        found = {task: rows[weights] for task, rows in tables.items() if weights in rows}
        if weights == UNCOLLAPSED and some_collapsed:
            found |= {task: row for task, row in pretrained.items() if not row.collapsed}
        if found:
            yield weights, {task: found[task] for task in tables if task in found}


def _section(rows: Mapping[str, TaskScores], runs: Sequence[Result]) -> str:
    example, task = runs[0], rows[CONSTANT].task
    head = ["weights", "seeds", "collapsed"]
    head += [f"{name}, {when}" for when in ("best", "last") for name in task.score_names]
    cells = {}
    for weights, row in rows.items():
        spreads = [
            _cell(scores[name]) for scores in (row.best, row.last) for name in task.score_names
        ]
        counts = [str(row.runs), str(row.collapsed)] if row.runs else ["", ""]
        name = CONSTANT_TITLE if weights == CONSTANT else weights
        cells[name] = dict(zip(head[1:], counts + spreads, strict=True))
    speed = statistics.median(run["tokens_per_second"] for run in runs)
    names = task.scores_of_best(example["plan"]["config"]["best_epoch_by"])
    choice = "mean of " * (len(names) > 1) + " and ".join(names)
    notes = (
        f"Median over seeds (lowest to highest) on {example['dev_examples']:,} dev examples after "
        f"training on {example['train_examples']:,}. *best*: the epoch with the best {choice} on "
        "the same dev examples, so it is optimistic. *last*: the last epoch, without selection. "
        f"{sum(run['seconds'] for run in runs):,.0f} s in all, {speed:,.0f} tokens/s (median) on "
        f"{example['device']}."
    )
    return _section_of(task.name, head, cells, notes)


def _csv(tables: Tables, protocol: Protocol) -> str:
    """Return one line per number: ours by task, weights, score and epoch, then the published."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["model", "task", "score", "epoch", "runs", "collapsed", "median", "lowest", "highest"]
    )
    for task, rows in tables.items():
        for weights, row in rows.items():
            scores = [("best", *each) for each in row.best.items()]
            scores += [("last", *each) for each in row.last.items()]
            scores += [(AS_PUBLISHED, protocol.metric(row.task), row.reported)]
            for epoch, name, values in scores:
                counts = row.runs, row.collapsed
                writer.writerow([weights, task, name, epoch, *counts, *spread(values)])
    for model, printed in protocol.table.items():
        for task, cell in printed.items():
            name, value = protocol.metric(TASKS[task]), float(cell.removesuffix("*"))
            value = value if name in LOWER_IS_BETTER else round(value / 100, 4)
            collapsed = int(cell.endswith("*"))
            writer.writerow(
                [f"published {model}", task, name, AS_PUBLISHED, 1, collapsed, *[value] * 3]
            )
    return text.getvalue()


def _section_of(
    title: str, head: Sequence[str], rows: Mapping[str, Mapping[str, str]], notes: str
) -> str:
    """Return a Markdown section; `rows` has cells by column, by the name in the first column."""
    cells = [[name, *(row.get(column, "") for column in head[1:])] for name, row in rows.items()]
    return "\n".join([f"## {title}", "", *markdown_table(head, cells), notes, ""])


def _cell(values: Sequence[float]) -> str:
    median, low, high = spread(values)
    return f"{median:.4f}" + (f" ({low:.4f} to {high:.4f})" if low < high else "")
