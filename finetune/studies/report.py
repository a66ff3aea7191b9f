"""The report of a study: Markdown, CSV, LaTeX and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas
from pandas import DataFrame, Series

from data_prep.common.files import write_atomically
from data_prep.common.markup import markdown_table
from data_prep.common.wording import in_short
from finetune.studies import results
from finetune.studies.picture import draw_curves, draw_lengths
from finetune.studies.results import Measured, Results
from finetune.studies.study import Arm, CheckedArm, Run, Study, differences

REPORT, TABLE, LATEX = "report.md", "report.csv", "report.tex"
Cell = Callable[[str, Series], str]
"""Writes the values of a figure, by its name."""


def write_report(
    study: Study, checked: Sequence[CheckedArm], runs: Sequence[Run], output: Path
) -> str:
    """Return the report as Markdown, and write report.md, .csv, .tex and pictures.

    Args:
        study: the study.
        checked: its arms.
        runs: its runs, of which some may not have begun.
        output: the folder of the runs' folders.
    """
    found = results.collect(study, runs, output)
    sections = [f"# {study.title}\n"]
    if found.unfinished:
        sections.append(f"Not finished, and left out: {', '.join(found.unfinished)}.\n")
    if found.pretraining:
        sections += _sections(study, checked, found)
        tables = [_latex(part) for part in (found.pretraining, found.finetuning) if part]
        write_atomically(output / LATEX, "\n".join(tables).encode())
    text = "\n".join(sections)
    write_atomically(output / REPORT, text.encode())
    write_atomically(output / TABLE, _csv(found).encode())
    if found.pretraining:  # last: the tables do not need matplotlib
        draw_curves(found.curves, output)
        draw_lengths(found.pretraining, output)
    return text


def _sections(study: Study, checked: Sequence[CheckedArm], found: Results) -> list[str]:
    seeds = max(map(len, found.pretraining.values()))
    best = f" Of {study.best} the best level is shown, chosen by the loss." if study.best else ""
    sections = [
        _table("Pretraining", found.pretraining, _median),
        f"Median over at most {seeds} seeds (lowest to highest).{best}\n",
        _comparison("Differences in pretraining", study, checked, found.pretraining),
    ]
    if found.finetuning:
        sections += [
            _table("Fine-tuning", found.finetuning, _median),
            "Per cent on dev after the last epoch, the mean over the seeds of fine-tuning; median "
            "over the seeds of pretraining (lowest to highest). Collapsed runs count.\n",
            _comparison("Differences in fine-tuning", study, checked, found.finetuning),
        ]
    return [*sections, _table("Cost", found.cost, _sum_up)]


def _table(title: str, measured: Measured, cell: Cell) -> str:
    names = results.names_of(measured)
    rows = [[arm.name, *_cells(frame, names, cell)] for arm, frame in measured.items()]
    return _markdown(title, ["arm", *names], rows)


def _cells(frame: DataFrame, names: Sequence[str], cell: Cell) -> list[str]:
    """Write the figures of an arm; a cell is empty where none of its seeds has the figure."""
    found = {name: frame[name].dropna() for name in names if name in frame}
    return [cell(name, found[name]) if len(found.get(name, ())) else "" for name in names]


def _median(name: str, values: Series) -> str:
    """Median, lowest and highest of a figure."""
    median, low, high = map(_number, (values.median(), values.min(), values.max()))
    return median if low == high else f"{median} ({low} to {high})"


def _sum_up(name: str, values: Series) -> str:
    """What all seeds cost together; the speed is a median."""
    total = values.median() if name == "tokens/s" else values.sum()
    return f"{total:.2f}" if name == "device hours" else in_short(total)


def _with_deviation(name: str, values: Series) -> str:
    """Mean and standard deviation of a figure."""
    average = _number(values.mean())
    return f"{average} ± {_number(results.deviation(values))}" if len(values) > 1 else average


def _number(value: float) -> str:
    """A loss has four digits, a score or perplexity two after the point."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _comparison(title: str, study: Study, checked: Sequence[CheckedArm], measured: Measured) -> str:
    """Return a table of the differences of arms that differ in one factor."""
    names = [name for name in results.names_of(measured) if name != "collapsed"]
    rows, confounded, intervals, seeds = [], list[str](), 0, 0
    for one, other in results.compared(measured, study.best):
        found = results.paired(measured, one, other).reindex(names, fill_value=math.nan)
        intervals, seeds = intervals + found["mean"].count(), max(seeds, int(found["seeds"].max()))
        pair = f"{other.name} − {one.name}"
        rows.append([pair, *map(_difference, found["mean"], found["half_width"])])
        if len(settings := _settings_that_differ(checked, one, other)) > 1:
            confounded.append(f"- {pair}: {', '.join(settings)}")
    notes = [
        f"Mean over at most {seeds} seeds that both arms have, with the 95 % interval of Student's "
        f"t; **bold** where it leaves out 0. One in twenty of these {intervals} intervals leaves "
        "out 0 by chance.\n"
    ]
    if confounded:
        notes.append(
            "Confounded: these differ in several settings, and the difference may come from any "
            f"of them.\n\n{chr(10).join(confounded)}\n"
        )
    return "\n".join([_markdown(title, ["difference", *names], rows), *notes])


def _difference(mean: float, half_width: float) -> str:
    if math.isnan(mean):  # no seed has both
        return ""
    if math.isnan(half_width):
        return f"{mean:+.4g}"
    digits = 3 if abs(mean) < 1 else 2
    text = f"{mean:+.{digits}f} ± {half_width:.{digits}f}"
    return f"**{text}**" if abs(mean) > half_width else text


def _settings_that_differ(checked: Sequence[CheckedArm], one: Arm, other: Arm) -> list[str]:
    """Return the settings of pretraining and fine-tuning in which two arms differ."""
    by_levels = {frozenset(each.arm.levels): each for each in checked}
    pretrained = [
        next(each for levels, each in by_levels.items() if levels <= set(arm.levels))
        for arm in (one, other)
    ]
    settings = differences(*pretrained)
    if len(one.levels) > len(pretrained[0].arm.levels):  # with a way of fine-tuning
        own = {key for each in pretrained for key in each.arm.settings}
        keys = sorted((one.settings.keys() | other.settings.keys()) - own)
        settings += [k for k in keys if one.settings.get(k) != other.settings.get(k)]
    return settings


def _markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"## {title}", "", *markdown_table(head, rows)])


def _csv(found: Results) -> str:
    """Return one line per number."""
    parts = {"pretraining": found.pretraining, "fine-tuning": found.finetuning, "cost": found.cost}
    tables = {(part, arm.name): rows for part, of in parts.items() for arm, rows in of.items()}
    if not tables:
        return "part,arm,seed,figure,value\n"
    rows = pandas.concat(tables, names=["part", "arm", "seed"]).rename_axis(columns="figure")
    return str(rows.stack().dropna().rename("value").to_csv())


def _latex(measured: Measured) -> str:
    """Return a table for the package booktabs: means and standard deviations over the seeds."""
    names = results.names_of(measured)
    cells = [_cells(frame, names, _with_deviation) for frame in measured.values()]
    table = pandas.DataFrame(cells, [arm.name for arm in measured], names)
    return str(table.to_latex(escape=True, caption="Mean and standard deviation over seeds."))
