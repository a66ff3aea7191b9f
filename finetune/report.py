"""The report of a folder's runs: medians and spreads beside the published table.

`collect` reads the results, `summary` makes one table of all numbers, and `write_report` writes it
as report.csv and, arranged for a reader, as report.md. Medians include collapsed runs; a further
row leaves them out.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from data_prep.common.files import write_atomically
from data_prep.common.markup import markdown_table
from finetune.protocols import COLUMNS, PROTOCOLS, Protocol
from finetune.result import RESULT, read_result
from finetune.runs import WEIGHTS, check_comparable
from finetune.scores import LOWER_IS_BETTER, mean
from finetune.tasks import TASKS, Task

REPORT = "report.md"
TABLE = "report.csv"
UNCOLLAPSED = "pretrained, without collapsed"
CONSTANT = "best constant answer"
"""For STS-B it is the mean, and not a class."""
AS_PUBLISHED = "best by this score"
"""The epoch of the scores that compare with published ones."""
_COLUMNS = ["model", "task", "score", "epoch", "runs", "collapsed", "median", "lowest", "highest"]
Result = Mapping[str, Any]
"""The content of result.json."""


def write_report(folder: Path) -> str:
    """Return the report as Markdown, and write report.md and report.csv.

    Raises:
        ValueError: there is no finished run.
    """
    results = collect(folder)
    protocol, table = _protocol(results), summary(results)
    sections, named = list[str](), table[table.task.isin([*TASKS])]
    if named.task.isin(COLUMNS).any():
        sections.append(_published_table(named, protocol))
    if len(named):
        sections.append(_official_table(named))
    for task, rows in table.groupby("task", sort=False):
        sections.append(_section(rows, [run for run in results if run["plan"].task == task]))
    text = "\n".join(sections)
    write_atomically(folder / REPORT, text.encode())
    write_atomically(folder / TABLE, table.to_csv(index=False).encode())
    return text


def collect(folder: Path) -> list[dict[str, Any]]:
    """Read every finished run's result, with its folder's name.

    Raises:
        ValueError: there is no such folder, or no finished run, or runs are not comparable.
    """
    paths = sorted(folder.glob(f"*/{RESULT}"))
    if not paths:
        lack = "has no finished run of `zeroclap glue`"
        raise ValueError(f"{folder}: {lack if folder.is_dir() else 'no such folder'}")
    results = [read_result(path.parent) | {"folder": path.parent.name} for path in paths]
    of_task = {result["plan"].task: result["plan"] for result in results}
    for path, result in zip(paths, results, strict=True):
        check_comparable(path.parent, result["plan"], of_task.values(), "the runs beside it")
    return results


def _protocol(results: Sequence[Result]) -> Protocol:
    """Return the protocol, which all runs of a folder share."""
    return PROTOCOLS[results[0]["plan"].protocol]


def summary(results: Sequence[Result]) -> DataFrame:
    """Return one row per number, by task (GLUE's first), weights, epoch and score.

    The column `model` is "pretrained" or "random", the weights that the runs started from,
    `UNCOLLAPSED` where some but not all pretrained runs collapsed, or `CONSTANT`. The column
    `epoch` is "best", chosen on the same dev split as `best_epoch_by` says, "last", without
    selection, or `AS_PUBLISHED`. The others are task, score, the numbers of runs and of collapsed
    runs, and median, lowest and highest over the seeds.
    """
    protocol, rows = _protocol(results), []
    tasks = {result["plan"].task: result["plan"].definition for result in results}
    for name in dict.fromkeys([*TASKS, *sorted(tasks)]):
        runs = [result for result in results if result["plan"].task == name]
        for model, group in _groups(runs):
            counts = len(group), sum(run["best"]["collapsed"] for run in group)
            counts = (0, 0) if model == CONSTANT else counts
            for score, epoch, values in _scores(group, tasks[name], protocol):
                spread = statistics.median(values), min(values), max(values)
                rows.append([model, name, score, epoch, *counts, *spread])
    return DataFrame(rows, columns=_COLUMNS)


def _groups(runs: Sequence[Result]) -> Iterator[tuple[str, Sequence[Result]]]:
    """Yield the runs of a task that share a row; a constant answer is like a run of one epoch."""
    for weights in WEIGHTS:
        own = [run for run in runs if run["plan"].weights == weights]
        succeeded = [run for run in own if not run["best"]["collapsed"]]
        if own:
            yield weights, own
        if weights == "pretrained" and 0 < len(succeeded) < len(own):
            yield UNCOLLAPSED, succeeded
    if runs:
        scores = {**runs[0]["constant"], "collapsed": True}
        yield CONSTANT, [{"best": scores, "last": scores, "epochs": [scores]}]


def _scores(
    runs: Sequence[Result], task: Task, protocol: Protocol
) -> Iterator[tuple[str, str, list[float]]]:
    """Yield the name, the epoch and the runs' values of each score."""
    for epoch in ("best", "last"):
        for name in task.score_names:
            yield name, epoch, [run[epoch][name] for run in runs]
    if len(task.official) > 1:
        yield _joined(task.official), "best", [mean(run["best"], task.official) for run in runs]
    yield protocol.metric(task), AS_PUBLISHED, [protocol.score(run, task) for run in runs]


def _joined(scores: Sequence[str]) -> str:
    return "mean of " * (len(scores) > 1) + " and ".join(scores)


def _published_table(table: DataFrame, protocol: Protocol) -> str:
    """Return the published scores of the tasks that were run, and ours."""
    columns = [task for task in COLUMNS if task in {*table.task}]
    rows = dict(protocol.table)
    for weights, scores in _by_weights(table[table.epoch == AS_PUBLISHED]):
        name = weights if weights == CONSTANT else f"**ours**, {weights}"
        rows[name] = {row.task: _as_printed(row) for row in scores.itertuples()}
    notes = (
        f"Protocol {protocol.name}, after {protocol.source}. Ours: median over seeds, with the "
        "number of collapsed runs in brackets. On dev, each run in the epoch where it is best, "
        "which is selected on the same examples, so the scores are optimistic: "
        f"{protocol.scores_in_words}."
    )
    if any("*" in cell for row in protocol.table.values() for cell in row.values()):
        notes += " * no better than a constant answer, as a collapsed run is."
    return _section_of("Beside the published scores", ["model", *columns], rows, notes)


def _as_printed(row: Any) -> str:  # noqa: ANN401 - a named tuple
    """Return a reported score in the units of the published tables."""
    is_loss = row.score in LOWER_IS_BETTER
    text = f"{row.median:.3f}" if is_loss else f"{100 * row.median:.1f}"
    return f"{text} ({row.collapsed} of {row.runs})" if row.collapsed else text


def _official_table(table: DataFrame) -> str:
    """Return the benchmark's scores: a run's is the mean of official ones (Wang et al. 2019)."""
    rows: dict[str, dict[str, str]] = {}
    for weights, scores in _by_weights(table[table.epoch == "best"]):
        medians = scores.set_index(["task", "score"])["median"]
        tasks = scores.task.unique()
        found = {task: 100 * medians[task, _joined(TASKS[task].official)] for task in tasks}
        row = {task: f"{value:.1f}" for task, value in found.items()}
        if of_mean := [value for task, value in found.items() if task in COLUMNS]:
            row["mean"] = f"{statistics.fmean(of_mean):.1f} of {len(of_mean)}"
        rows[weights] = row
    return _section_of(
        "The benchmark's own scores",
        ["weights", *table.task.unique(), "mean"],
        rows,
        "Median over seeds on dev, in per cent, in the epoch whose model is kept: Matthews "
        "correlation for CoLA, mean of accuracy and F1 for MRPC and QQP, mean of Pearson and "
        "Spearman for STS-B, mean of matched and mismatched accuracy for MNLI, else accuracy; the "
        "mean is over the tasks that were run, but for WNLI, which the papers leave out.",
    )


def _by_weights(table: DataFrame) -> Iterator[tuple[str, DataFrame]]:
    """Yield each kind of weights with its rows of all tasks, if it has any.

    `UNCOLLAPSED` needs a collapsed run in some task, and includes tasks in which none collapsed.
    """
    pretrained = table.model == "pretrained"
    for weights in ("pretrained", UNCOLLAPSED, "random", CONSTANT):
        chosen = table.model == weights
        if weights == UNCOLLAPSED and table[pretrained].collapsed.any():
            chosen |= pretrained & (table.collapsed == 0)
        if chosen.any():
            yield weights, table[chosen]


def _section(table: DataFrame, runs: Sequence[Result]) -> str:
    example, task = runs[0], runs[0]["plan"].definition
    cells: dict[str, dict[str, str]] = {}
    for weights, rows in table[table.epoch != AS_PUBLISHED].groupby("model", sort=False):
        row = cells[str(weights)] = {}
        for each in rows.itertuples():
            row |= {"seeds": str(each.runs), "collapsed": str(each.collapsed)} if each.runs else {}
            row[f"{each.score}, {each.epoch}"] = _cell(each)
    head = ["weights", "seeds", "collapsed"]
    head += [f"{name}, {when}" for when in ("best", "last") for name in task.score_names]
    speed = statistics.median(run["tokens_per_second"] for run in runs)
    choice = _joined(task.scores_of_best(example["plan"].config.best_epoch_by))
    long = sum(example["too_long"].values()) - example["too_long"]["train"]
    missing = {
        "training examples above max_tokens were left out": example["too_long"]["train"],
        "ragged training rows were left out": example["skipped_rows"],
        "other examples above max_tokens were cut": long,
    }
    notes = (
        f"Median over seeds (lowest to highest) on {example['dev_examples']:,} dev examples after "
        f"training on {example['train_examples']:,}. "
        + "".join(f"{number:,} {what}. " for what, number in missing.items() if number)
        + f"*best*: the epoch with the best {choice} on the same dev examples, so it is "
        "optimistic. *last*: the last epoch, without selection. "
        "*collapsed*: runs whose model gives one answer to everything. "
        f"{sum(run['seconds'] for run in runs):,.0f} s in all, {speed:,.0f} tokens/s (median) on "
        f"{example['device']}."
    )
    return _section_of(task.name, head, cells, notes)


def _section_of(
    title: str, head: Sequence[str], rows: Mapping[str, Mapping[str, str]], notes: str
) -> str:
    """Return a Markdown section; `rows` has cells by column, by the name in the first column."""
    cells = [[name, *(row.get(column, "") for column in head[1:])] for name, row in rows.items()]
    return "\n".join([f"## {title}", "", *markdown_table(head, cells), notes, ""])


def _cell(row: Any) -> str:  # noqa: ANN401 - a named tuple
    spread = f" ({row.lowest:.4f} to {row.highest:.4f})" if row.lowest < row.highest else ""
    return f"{row.median:.4f}{spread}"
