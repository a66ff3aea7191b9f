"""The report of a study: Markdown, CSV, LaTeX and pictures."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from data_prep.common.files import write_atomically
from data_prep.common.markup import markdown_table
from data_prep.common.wording import in_short
from finetune.studies import results
from finetune.studies.picture import draw_curves, draw_lengths
from finetune.studies.results import Curve, Difference, Measured, Results
from finetune.studies.study import Arm, CheckedArm, Run, Study, differences

REPORT, TABLE, LATEX = "report.md", "report.csv", "report.tex"
Cell = Callable[[str, Sequence[float]], str]
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
    seeds = max(len(by_seed) for by_seed in found.pretraining.values())
    best = f" Of {study.best} the best level is shown, chosen by the loss." if study.best else ""
    sections = [
        _table("Pretraining", found.pretraining, _median),
        f"Median over at most {seeds} seeds (lowest to highest).{best}\n",
        _comparison("Differences in pretraining", study, checked, found.pretraining, found.curves),
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
    rows = [
        [arm.name, *(cell(name, _values(by_seed, name)) for name in names)]
        for arm, by_seed in measured.items()
    ]
    return _markdown(title, ["arm", *names], rows)


def _values(by_seed: Mapping[int, results.Figures], name: str) -> list[float]:
    return [figures[name] for figures in by_seed.values() if name in figures]


def _median(name: str, values: Sequence[float]) -> str:
    """Median, lowest and highest of a figure."""
    if not values:
        return ""
    median, low, high = (_number(f(values)) for f in (np.median, np.min, np.max))  # NaN if one is
    return median if low == high else f"{median} ({low} to {high})"


def _sum_up(name: str, values: Sequence[float]) -> str:
    """What all seeds cost together; the speed is a median."""
    total = statistics.median(values) if name == "tokens/s" else math.fsum(values)
    return f"{total:.2f}" if name == "device hours" else in_short(total)


def _number(value: float) -> str:
    """A loss has four digits, a score or perplexity two after the point."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _comparison(
    title: str,
    study: Study,
    checked: Sequence[CheckedArm],
    measured: Measured,
    curves: Mapping[Arm, Mapping[int, Curve]] = MappingProxyType({}),
) -> str:
    """Return a table of the differences of arms that differ in one factor."""
    names = [name for name in results.names_of(measured) if name != "collapsed"]
    rows, found, confounded = [], list[Difference](), list[str]()
    for one, other in results.compared(measured, study.best):
        of_pair = [results.paired(measured, name, one, other) for name in names]
        found += filter(None, of_pair)
        pair = f"{other.name} − {one.name}"
        tokens = [_tokens(results.tokens_to_its_loss(curves, one, other))] if curves else []
        rows.append([pair, *map(_difference, of_pair), *tokens])
        if len(settings := _settings_that_differ(checked, one, other)) > 1:
            confounded.append(f"- {pair}: {', '.join(settings)}")
    head = ["difference", *names, *(["tokens"] if curves else [])]
    seeds = max((each.seeds for each in found), default=0)
    notes = [
        f"Mean over at most {seeds} seeds that both arms have, with the 95 % interval of Student's "
        f"t; **bold** where it leaves out 0. One in twenty of these {len(found)} intervals leaves "
        "out 0 by chance.\n"
    ]
    if curves:
        notes.append(
            "Tokens: the share of its tokens after which the first named has the other's last "
            "validation loss, though its learning rate has not come down by then.\n"
        )
    if confounded:
        notes.append(
            "Confounded: these differ in several settings, and the difference may come from any "
            f"of them.\n\n{chr(10).join(confounded)}\n"
        )
    return "\n".join([_markdown(title, head, rows), *notes])


def _tokens(shares: Sequence[float]) -> str:
    """Write shares of tokens by seed: their median, lowest and highest."""
    if not shares or math.isinf(max(shares)):
        return "never" if shares and math.isinf(min(shares)) else "not with every seed"
    median, low, high = (f"{f(shares):.0%}" for f in (statistics.median, min, max))
    return median if low == high else f"{median} ({low} to {high})"


def _difference(found: Difference | None) -> str:
    if found is None:
        return ""
    if math.isnan(found.half_width):
        return f"{found.mean:+.4g}"
    digits = 3 if abs(found.mean) < 1 else 2
    text = f"{found.mean:+.{digits}f} ± {found.half_width:.{digits}f}"
    return f"**{text}**" if found.is_clear else text


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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["part", "arm", "seed", "figure", "value"])
    parts = {
        "pretraining": found.pretraining,
        "fine-tuning": found.finetuning,
        "cost": found.cost,
    }
    for part, measured in parts.items():
        for arm, by_seed in measured.items():
            for seed, figures in by_seed.items():
                writer.writerows([part, arm.name, seed, *each] for each in figures.items())
    return text.getvalue()


def _latex(measured: Measured) -> str:
    """Return a table for the package booktabs: means and standard deviations over the seeds."""
    import pandas

    names = results.names_of(measured)
    cells = [
        [_with_deviation(_values(by_seed, name)) for name in names] for by_seed in measured.values()
    ]
    table = pandas.DataFrame(cells, [arm.name for arm in measured], names)
    return str(table.to_latex(escape=True, caption="Mean and standard deviation over seeds."))


def _with_deviation(values: Sequence[float]) -> str:
    if not values:
        return ""
    average = _number(statistics.fmean(values))
    return f"{average} ± {_number(results.deviation(values))}" if len(values) > 1 else average
