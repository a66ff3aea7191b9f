"""The report of a folder's runs: medians and spreads beside the published table.

`write_report` writes the rows of `summary` as report.md, report.csv, report.tex and two pictures.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data_prep.common.files import write_atomically
from data_prep.common.markup import latex_table, markdown_table
from data_prep.common.wording import count
from finetune import benchmarks, comparison, glue, protocols, published
from finetune.acceptability import PROVENANCE
from finetune.protocols import Choice, Protocol, is_loss
from finetune.scores import title
from finetune.summary import (
    MAJORITY,
    WITHOUT,
    Result,
    Row,
    Spread,
    Tables,
    collect,
    summary,
    tasks_of,
)
from finetune.task import Task

REPORT = "report.md"
TABLE = "report.csv"
LATEX = "report.tex"
CONSTANT = "best constant answer"
"""Title of the majority row, which for STS-B is the mean and not a class."""
AS_PUBLISHED = "best by this score"
"""The epoch of the scores in report.csv that compare with published ones."""


def write_report(folder: Path, against: Path | None = None) -> str:
    """Return the report as Markdown, and write report.md, report.csv, report.tex and pictures.

    Args:
        folder: of runs.
        against: of another model's runs, to compare with.

    Raises:
        ValueError: there is no finished run, or the two folders cannot be compared.
    """
    from finetune.picture import draw_beside_published, draw_epochs

    everything = collect(folder)
    protocol = protocols.of_results(everything)
    results, choices = protocols.choose(everything, tasks_of(everything))
    tables = summary(results)
    sections = [_section(task, rows, results) for task, rows in tables.items()]
    searches = [_search(c, tables[c.task][c.weights].task, protocol) for c in choices]
    named = {task: rows for task, rows in tables.items() if task in benchmarks.TASKS}
    overview = [_published_table(named, protocol), _official_table(named)] if named else []
    compared = [_comparison(folder, results, against)] if against else []
    text = "\n".join([*overview, *compared, *sections, *searches, *_similarity(results)])
    write_atomically(folder / REPORT, text.encode())
    write_atomically(folder / TABLE, _csv(tables, protocol).encode())
    write_atomically(folder / LATEX, _latex(tables).encode())
    if named:
        draw_beside_published(folder, results)
    draw_epochs(folder, results)
    return text


def _published_table(tables: Tables, protocol: Protocol) -> str:
    rows = dict(protocol.table)
    for weights, scored in _by_weights(tables):
        rows[CONSTANT if weights == MAJORITY else f"**ours**, {weights}"] = {
            task: _as_printed(row, protocol)
            + (f" ({row.collapsed} of {row.runs})" if row.collapsed else "")
            for task, row in scored.items()
        }
    epoch = (
        "the epoch where it is best, which is selected on the examples that it is scored on and "
        "flatters"
        if protocol.epoch == "best"
        else "its last epoch"
    )
    notes = (
        f"Protocol {protocol.name}, after {protocol.source}. Ours: {protocol.over_seeds} over "
        "seeds, with the number of collapsed runs in brackets. On dev, each run in "
        f"{epoch}: {protocol.scores_in_words}."
    )
    if any("*" in cell for row in protocol.table.values() for cell in row.values()):
        notes += " * no better than a constant answer, as a collapsed run is."
    return _section_of("Beside the published scores", ["model", *published.TASKS], rows, notes)


def _comparison(folder: Path, results: Sequence[Result], against: Path) -> str:
    """Return a table of the differences from another model's runs, with their significance."""
    others = collect(against)
    ours, theirs = protocols.of_results(results).name, protocols.of_results(others).name
    if ours != theirs:
        raise ValueError(
            f"{against}: has protocol {theirs}, {folder} has {ours}; compare runs of one protocol"
        )
    their_results, _ = protocols.choose(others, tasks_of(others))
    rows = {}
    for name, task in tasks_of(results).items():
        pairs = _first_runs(results, name), _first_runs(their_results, name)
        seeds = sorted(pairs[0].keys() & pairs[1].keys())
        if seeds:
            read = (
                [comparison.read_predictions(where / runs[seed]["folder"], task) for seed in seeds]
                for where, runs in zip((folder, against), pairs, strict=True)
            )
            found = comparison.compare(task, *read)
            least = found.p_value == 2 / comparison.RESAMPLES
            rows[name] = {
                "seeds": str(found.seeds),
                "ours": f"{100 * found.ours:.1f}",
                "theirs": f"{100 * found.theirs:.1f}",
                "difference": f"{100 * (found.ours - found.theirs):+.1f}",
                "95 % interval": f"{100 * found.low:+.1f} to {100 * found.high:+.1f}",
                "p": f"{'at most ' if least else ''}{found.p_value:.3f}",
            }
    if not rows:
        raise ValueError(
            f"{against}: has no task and seed that {folder} has; compare runs of the same tasks "
            "with the same seeds, from pretrained weights"
        )
    return _section_of(
        f"Compared with {against}",
        ["task", "seeds", "ours", "theirs", "difference", "95 % interval", "p"],
        rows,
        "The benchmark's scores in per cent, averaged over the seeds that both have, with "
        "collapsed runs. Interval and two-sided p: paired bootstrap, "
        f"{comparison.RESAMPLES:,} resamples of seeds and dev examples. With few seeds the "
        "interval is too narrow. One task in twenty has p below 0.05 by chance.",
    )


def _first_runs(results: Sequence[Result], task: str) -> dict[int, Result]:
    """Return a task's runs from pretrained weights by seed, without retries."""
    return {
        run["seed"]: run
        for run in results
        if (run["task"], run["weights"], run["retry"]) == (task, "pretrained", 0)
    }


def _search(choice: Choice, task: Task, protocol: Protocol) -> str:
    """Return the table of the settings that a search compared, the chosen ones in bold."""
    rows = {}
    for point, (score, runs) in choice.scores.items():
        settings = ", ".join(f"{name} {value:g}" for name, value in point)
        settings = f"**{settings}**" if point == choice.chosen else settings
        rows[settings] = {"seeds": str(runs), "score": f"{score:.4f}"}
    return _section_of(
        f"{task.name}: search, {choice.weights}",
        ["settings", "seeds", "score"],
        rows,
        f"The {protocol.over_seeds} over seeds of {title(protocol.scores(task))}. All other tables "
        "have the runs with the best settings alone. They are chosen on the dev examples that they "
        "are scored on, which flatters, among those that are done with every seed.",
    )


def _official_table(tables: Tables) -> str:
    """Return the benchmark's scores: the mean of each task's official ones (Wang et al. 2019)."""
    rows: dict[str, dict[str, str]] = {}
    for weights, scored in _by_weights(tables):
        scores = {
            task: 100 * statistics.fmean(row.best[n].median for n in row.task.official)
            for task, row in scored.items()
        }
        rows[CONSTANT if weights == MAJORITY else weights] = {
            **{task: f"{value:.1f}" for task, value in scores.items()},
            "mean": f"{statistics.fmean(scores.values()):.1f} of {len(scores)}",
        }
    return _section_of(
        "The benchmark's own scores",
        ["weights", *dict.fromkeys([*glue.TASKS, *tables]), "mean"],
        rows,
        "On dev, in per cent, in the epoch whose model is kept (epochs.png has every epoch): "
        "Matthews correlation for CoLA, mean of accuracy "
        "and F1 for MRPC and QQP, mean of Pearson and Spearman for STS-B, mean of matched and "
        "mismatched accuracy for MNLI, else accuracy; the mean is over the tasks that were run.",
    )


def _by_weights(tables: Tables) -> Iterator[tuple[str, dict[str, Row]]]:
    """Yield each kind of weights with its rows by task, if it has any.

    `WITHOUT` needs a collapsed run in some task, and includes the tasks in which none collapsed.
    """
    pretrained = {task: rows["pretrained"] for task, rows in tables.items() if "pretrained" in rows}
    some_collapsed = any(row.collapsed for row in pretrained.values())
    for weights in ("pretrained", WITHOUT, "random", MAJORITY):
        found = {task: rows[weights] for task, rows in tables.items() if weights in rows}
        if weights == WITHOUT and some_collapsed:
            found |= {task: row for task, row in pretrained.items() if not row.collapsed}
        if found:
            yield weights, {task: found[task] for task in tables if task in found}


def _as_printed(row: Row, protocol: Protocol) -> str:
    """Return what the protocol reports, in the units of its table."""
    loss = is_loss(protocol.scores(row.task))
    return f"{row.combined:.3f}" if loss else f"{100 * row.combined:.1f}"


def _choice_of_epoch(run: Result) -> str:
    """Say which epoch is a run's best one."""
    best_epoch_by = run["plan"]["config"]["best_epoch_by"]
    if best_epoch_by == "last":
        return "whose model is kept, the last"
    names = benchmarks.of_result(run).scores_of_best(best_epoch_by)
    return f"with the best {title(names)} on the same dev examples, which flatters"


def _section(task: str, rows: Mapping[str, Row], results: Sequence[Result]) -> str:
    runs = [result for result in results if result["task"] == task]
    names = benchmarks.of_result(runs[0]).score_names
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
    notes = [
        f"Median over seeds (lowest to highest) on {example['dev_examples']:,} dev examples after "
        f"training on {example['train_examples']:,}. *best*: the epoch "
        f"{_choice_of_epoch(example)}. *last*: "
        f"the last epoch, without selection. {sum(run['seconds'] for run in runs):,.0f} s in all, "
        f"{speed:,.0f} tokens/s (median) on {example['device']}."
    ]
    if retries:
        succeeded = sum(run["retry"] > 0 and not run["collapsed"] for run in runs)
        notes.append(f"Retries of collapsed runs: {retries}, of which {succeeded} succeeded.")
    provenance = Path(example["plan"]["data"]) / task / PROVENANCE
    if provenance.is_file():
        made = json.loads(provenance.read_text(encoding="utf-8"))["made"]
        notes.append(f"The data is not the benchmark's: {made}.")
    return _section_of(task, head, cells, "\n\n".join(notes))


def _csv(tables: Tables, protocol: Protocol) -> str:
    """Return one line per number: ours by task, weights, score and epoch, then the published."""
    text = io.StringIO()
    epoch = AS_PUBLISHED if protocol.epoch == "best" else "last"
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
            values = dataclasses.astuple(row.reported)
            name = "+".join(protocol.scores(row.task))
            writer.writerow([weights, task, name, epoch, row.runs, row.collapsed, *values])
    for model, printed in protocol.table.items():
        for task, cell in printed.items():
            names = protocol.scores(benchmarks.find(task))
            value = float(cell.removesuffix("*"))
            value = value if is_loss(names) else round(value / 100, 4)
            collapsed = int(cell.endswith("*"))
            writer.writerow(
                [f"published {model}", task, "+".join(names), epoch, 1, collapsed, *[value] * 3]
            )
    return text.getvalue()


def _similarity(results: Sequence[Result]) -> Iterator[str]:
    """Yield a section with the similarity of STS-B's pairs before fine-tuning, for each model.

    Nothing where STS-B was not run, or model or data are no longer where they were.
    """
    from finetune import examples
    from finetune.similarity import correlation

    task = glue.TASKS["STS-B"]
    plans = {r["plan"]["model"]: r["plan"] for r in results if r["task"] == task.name}
    rows = {}
    for model, plan in plans.items():
        with contextlib.suppress(ValueError):
            pairs = examples.read_split(task, plan["data"], "dev").examples
            rows[Path(model).name] = {"Spearman": f"{correlation(Path(model), pairs):.4f}"}
    if rows:
        yield _section_of(
            "Before fine-tuning",
            ["model", "Spearman"],
            rows,
            "Correlation of STS-B's labels on dev with the cosines of mean-pooled features. Random "
            "weights are above 0 too, because equal words make features similar; a model near 0 is "
            "broken, or read wrongly.",
        )


def _latex(tables: Tables) -> str:
    """Return the tasks' scores as a table for the package booktabs, with standard errors."""
    rows, runs, collapsed = [], 0, 0
    for weights, scored in _by_weights(tables):
        cells = {task: _with_error(row.scores) for task, row in scored.items() if row.scores}
        if cells:
            rows.append([weights, *(cells.get(task, "") for task in tables)])
            runs = max(runs, *(row.runs for row in scored.values()))
            collapsed += sum(row.collapsed for row in scored.values())
    caption = (
        f"Scores on dev in per cent: median of at most {count(runs, 'seed')}, with the standard "
        f"error of the mean. Collapsed runs among them: {collapsed}."
    )
    return latex_table(["weights", *tables], rows, caption)


def _with_error(values: Sequence[float]) -> str:
    """Return the median in per cent, and of several values the standard error of their mean."""
    median = f"{100 * statistics.median(values):.1f}"
    if len(values) < 2:
        return median
    return f"{median} $\\pm$ {100 * statistics.stdev(values) / len(values) ** 0.5:.1f}"


def _section_of(
    title: str, head: Sequence[str], rows: Mapping[str, Mapping[str, str]], notes: str
) -> str:
    """Return a Markdown section; `rows` has cells by column, by the name in the first column."""
    cells = [[name, *(row.get(column, "") for column in head[1:])] for name, row in rows.items()]
    return "\n".join([f"## {title}", "", *markdown_table(head, cells), notes, ""])


def _cell(spread: Spread) -> str:
    if spread.lowest == spread.highest:
        return f"{spread.median:.4f}"
    return f"{spread.median:.4f} ({spread.lowest:.4f} to {spread.highest:.4f})"
