"""What the runs of a folder come to: medians and spreads beside the original's table.

`collect` reads the results, `summary` sorts them into rows, `write_report` writes report.md,
report.csv and report.png. Collapsed runs stand in every median of "all"; beside it are the medians
without them, in which the first retry that held stands for its seed.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.files import strict_json, write_atomically
from finetune import glue, published
from finetune.acceptability import PROVENANCE
from finetune.config import RESULT, WEIGHTS
from finetune.planning import result_of
from finetune.scores import LOWER_IS_BETTER

RESULTS = "results.jsonl"
REPORT = "report.md"
TABLE = "report.csv"
MAJORITY = "majority"
CONSTANT = "best constant answer"
"""What the majority's row is called: of STS-B it is no class."""
WITHOUT = "pretrained, without collapsed"
Result = Mapping[str, Any]
"""What result.json holds."""


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
    """The runs of one task that began with the same kind of weights; scores by name."""

    runs: int
    best: Mapping[str, Spread]
    """In each run's best epoch, chosen on the same dev split by the task's first metric."""
    last: Mapping[str, Spread]
    """After each run's last epoch: nothing chosen."""
    collapsed: int = 0
    """How many of the runs collapsed; they are among the scores."""


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
    results = [result_of(path.parent) for path in paths]
    lines = "".join(strict_json(result) + "\n" for result in results)
    write_atomically(folder / RESULTS, lines.encode())
    return results


def summary(results: Sequence[Result]) -> dict[str, dict[str, Row]]:
    """Scores by task, and by what the runs began with.

    The rows of a task: "pretrained", `WITHOUT` where a pretrained run collapsed and one held,
    "random" (those there are), and `MAJORITY`, the best constant answer.
    """
    tables: dict[str, dict[str, Row]] = {}
    for task in (name for name in glue.TASKS if any(r["task"] == name for r in results)):
        runs = [result for result in results if result["task"] == task]
        rows = {}
        for weights in WEIGHTS:
            first = [r for r in runs if r["weights"] == weights and r["retry"] == 0]
            if first:
                rows[weights] = _row(first, task)
            held = _held(runs) if weights == "pretrained" else []
            if held and any(run["collapsed"] for run in first):
                rows[WITHOUT] = _row(held, task)
        constant = {name: Spread.of([value]) for name, value in runs[0]["majority"].items()}
        tables[task] = {**rows, MAJORITY: Row(0, constant, constant)}
    return tables


def _held(runs: Sequence[Result]) -> list[Result]:
    """Of each seed the first pretrained run that did not collapse, where there is one."""
    held = [run for run in runs if run["weights"] == "pretrained" and not run["collapsed"]]
    by_seed: dict[int, Result] = {}
    for run in sorted(held, key=lambda run: int(run["retry"])):
        by_seed.setdefault(run["seed"], run)
    return list(by_seed.values())


def _row(runs: Sequence[Result], task: str) -> Row:
    best, last = (
        {name: Spread.of([run[when][name] for run in runs]) for name in glue.find(task).score_names}
        for when in ("best", "last")
    )
    return Row(len(runs), best, last, sum(bool(run["collapsed"]) for run in runs))


def write_report(folder: Path) -> str:
    """The report as Markdown, also written to report.md, report.csv and report.png.

    Raises:
        ValueError: there is no finished run.
    """
    from finetune.picture import draw

    results = collect(folder)
    tables = summary(results)
    sections = [_section(task, rows, results) for task, rows in tables.items()]
    text = "\n".join([_seed_table(tables), _official_table(tables), *sections])
    write_atomically(folder / REPORT, text.encode())
    write_atomically(folder / TABLE, _csv(tables).encode())
    draw(folder, results)
    return text


def official(task: str, scores: Mapping[str, Spread]) -> float:
    """The benchmark's score of a task, per cent: the mean of its official ones (Wang et al. 2019).

    Of medians over seeds.
    """
    return 100 * statistics.fmean(scores[name].median for name in glue.find(task).official)


def in_seed_units(task: str, value: float) -> float:
    """A first metric as the original's table prints it: per cent, but for STS-B's loss."""
    return value if glue.find(task).is_regression else 100 * value


def _seed_table(tables: Mapping[str, Mapping[str, Row]]) -> str:
    """The original's table with our rows below."""
    rows: dict[str, dict[str, str]] = {
        name: {task: _printed(task, value) for task, value in scores.items()}
        for name, scores in published.table().items()
    }
    for weights in ("pretrained", WITHOUT, "random", MAJORITY):
        scored = _with(weights, tables)
        cells = {
            task: _in_seed_format(task, row.best[glue.find(task).metrics[0]].median)
            + (f" ({row.collapsed} of {row.runs})" if row.collapsed else "")
            for task, row in scored.items()
        }
        if cells:
            rows[CONSTANT if weights == MAJORITY else f"**ours**, {weights}"] = cells
    return "\n".join(
        [
            "## Beside the original",
            "",
            *_table(["model", *published.TASKS], rows),
            "",
            f"{published.SOURCE}: one run each. Ours: medians over seeds, in brackets how many "
            "collapsed. Accuracy of the best epoch on dev in per cent, of STS-B its loss, less "
            "being better; the epoch is chosen on the sentences that it is scored on, which "
            "flatters. * no better than a constant answer, as a collapsed run is.",
            "",
        ]
    )


def _with(weights: str, tables: Mapping[str, Mapping[str, Row]]) -> dict[str, Row]:
    """The tasks' rows of one name; `WITHOUT` has the tasks too of which no run collapsed."""
    if weights != WITHOUT:
        return {task: rows[weights] for task, rows in tables.items() if weights in rows}
    pretrained = _with("pretrained", tables)
    if not any(row.collapsed for row in pretrained.values()):
        return {}
    found = {task: tables[task].get(WITHOUT, row) for task, row in pretrained.items()}
    return {task: row for task, row in found.items() if not row.collapsed}


def _printed(task: str, value: float) -> str:
    mark = "*" if published.looks_collapsed(task, value) else ""
    return f"{value:.3f}{mark}" if task == "STS-B" else f"{value:.1f}{mark}"


def _in_seed_format(task: str, value: float) -> str:
    digits = 3 if glue.find(task).is_regression else 1
    return f"{in_seed_units(task, value):.{digits}f}"


def _official_table(tables: Mapping[str, Mapping[str, Row]]) -> str:
    rows: dict[str, dict[str, str]] = {}
    for weights in ("pretrained", WITHOUT, "random", MAJORITY):
        scored = {task: official(task, row.best) for task, row in _with(weights, tables).items()}
        if scored:
            cells = {task: f"{value:.1f}" for task, value in scored.items()}
            mean = f"{statistics.fmean(scored.values()):.1f} of {len(scored)}"
            rows[CONSTANT if weights == MAJORITY else weights] = {**cells, "mean": mean}
    return "\n".join(
        [
            "## The benchmark's own scores",
            "",
            *_table(["weights", *glue.TASKS, "mean"], rows),
            "",
            "On dev, in the same epochs, per cent: Matthews correlation of CoLA, mean of accuracy "
            "and F1 of MRPC and QQP, mean of Pearson and Spearman of STS-B, mean of matched and "
            "mismatched accuracy of MNLI, else accuracy; the mean is over the tasks that ran.",
            "",
        ]
    )


def _section(task: str, rows: Mapping[str, Row], results: Sequence[Result]) -> str:
    names = glue.find(task).score_names
    runs = [result for result in results if result["task"] == task]
    head = ["weights", "seeds", "collapsed"]
    head += [f"{name}, {when}" for when in ("best", "last") for name in names]
    cells = {}
    for weights, row in rows.items():
        spreads = [_cell(scores[name]) for scores in (row.best, row.last) for name in names]
        counts = [str(row.runs), str(row.collapsed)] if row.runs else ["", ""]
        name = CONSTANT if weights == MAJORITY else weights
        cells[name] = dict(zip(head[1:], counts + spreads, strict=True))
    example, retries = runs[0], sum(run["retry"] > 0 for run in runs)
    speed = statistics.median(run["tokens_per_second"] for run in runs)
    lines = [
        f"## {task}",
        "",
        *_table(head, cells),
        "",
        f"Median over seeds (lowest to highest) on {example['dev_examples']:,} dev examples after "
        f"training on {example['train_examples']:,}. *best*: the epoch with the best "
        f"{names[0]} on the same dev examples, as the original reports it; it flatters. *last*: "
        f"the last epoch, nothing chosen. {sum(run['seconds'] for run in runs):,.0f} s in all, "
        f"{speed:,.0f} tokens/s (median) on {example['device']}.",
    ]
    if retries:
        held = sum(run["retry"] > 0 and not run["collapsed"] for run in runs)
        lines.append(f"\nRetries of collapsed runs: {retries}, of which {held} held.")
    provenance = Path(example["plan"]["data"]) / task / PROVENANCE
    if provenance.is_file():
        made = json.loads(provenance.read_text(encoding="utf-8"))["made"]
        lines.append(f"\nThe data is not the benchmark's: {made}.")
    return "\n".join([*lines, ""])


def _csv(tables: Mapping[str, Mapping[str, Row]]) -> str:
    """A line a number: ours by task, weights, score and epoch, then the original's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["model", "task", "score", "epoch", "runs", "collapsed", "median", "lowest", "highest"]
    )
    for task, rows in tables.items():
        for weights, row in rows.items():
            for when, scores in (("best", row.best), ("last", row.last)):
                for name, spread in scores.items():
                    values = dataclasses.astuple(spread)
                    writer.writerow([weights, task, name, when, row.runs, row.collapsed, *values])
    for model, printed in published.table().items():
        for task, value in printed.items():
            name = glue.find(task).metrics[0]
            value = value if name in LOWER_IS_BETTER else round(value / 100, 4)
            collapsed = int(published.looks_collapsed(task, printed[task]))
            writer.writerow([f"published {model}", task, name, "best", 1, collapsed, *[value] * 3])
    return text.getvalue()


def _table(head: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Lines of a Markdown table; a row's cells by the names in `head`, after its own name."""
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [
        _line([name, *(cells.get(column, "") for column in head[1:])])
        for name, cells in rows.items()
    ]
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(spread: Spread) -> str:
    if spread.lowest == spread.highest:
        return f"{spread.median:.4f}"
    return f"{spread.median:.4f} ({spread.lowest:.4f} to {spread.highest:.4f})"
