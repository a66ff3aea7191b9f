"""The report of a study: Markdown, CSV, LaTeX, and pictures with bands over the seeds."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas
from pandas import DataFrame, Series

from data_prep.common import pictures
from data_prep.common.files import write_atomically
from data_prep.common.markup import markdown_table
from data_prep.common.wording import changes, in_short
from finetune.studies import results
from finetune.studies.results import Curve, Measured, Results
from finetune.studies.study import Arm, Checked, Study, comparisons, differences
from pretrain.records.plots import smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


REPORT, TABLE, LATEX = "report.md", "report.csv", "report.tex"
Cell = Callable[[str, Series], str]
"""Writes the values of a figure, by its name."""


def write_report(study: Study, checked: Mapping[Arm, Checked], found: Results, output: Path) -> str:
    """Return the report as Markdown, and write report.md, .csv, .tex and pictures.

    Args:
        study: the study.
        checked: its arms.
        found: the results of its runs, of which some may not have begun.
        output: the folder for the report.
    """
    sections = [f"# {study.title}\n"]
    if found.unfinished:
        sections.append(
            f"Not finished, and left out: {', '.join(found.unfinished)}. The same command "
            "continues them; to repeat a stage of a damaged run, delete the stage's .done file.\n"
        )
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


def _sections(study: Study, checked: Mapping[Arm, Checked], found: Results) -> list[str]:
    seeds = max(map(len, found.pretraining.values()))
    median = f"Median over at most {seeds} seeds (lowest to highest)."
    over = median if seeds > 1 else "Of one seed."
    best = f" Of {study.best} the best level is shown, chosen by the loss." if study.best else ""
    sections = [
        _table("Pretraining", found.pretraining, _median),
        f"{over}{best}\n",
        _comparison("Differences in pretraining", study, checked, found.pretraining),
    ]
    if found.finetuning:
        over = (
            "the median over the seeds of fine-tuning (lowest to highest) of one pretrained model; "
            "another seed of pretraining may differ by more than the intervals below"
            if len(study.seeds) == 1
            else "the mean over the seeds of fine-tuning; median over the seeds of pretraining "
            "(lowest to highest)"
        )
        sections += [
            _table("Fine-tuning", found.finetuning, _median),
            f"Per cent on dev after the last epoch, {over}. Scores of collapsed runs count; their "
            "number is in the table.\n",
            _comparison("Differences in fine-tuning", study, checked, found.finetuning),
        ]
    note = "Sums over the seeds, with abandoned steps, without padding; tokens/s is a median.\n"
    return [*sections, _table("Cost", found.cost, _sum_up), note]


def _table(title: str, measured: Measured, cell: Cell) -> str:
    names = results.names_of(measured)
    rows = [[arm.name, *_cells(frame, names, cell)] for arm, frame in measured.items()]
    return _markdown(title, ["arm", *names], rows)


def _cells(frame: DataFrame, names: Sequence[str], cell: Cell) -> list[str]:
    """Write the figures of an arm; a cell is empty where none of its seeds has the figure.

    Of collapsed runs, every table has their number.
    """
    own = {results.COLLAPSED: _sum_up}
    columns = frame.reindex(columns=names).items()
    return [own.get(n, cell)(n, found.dropna()) if found.count() else "" for n, found in columns]


def _median(name: str, values: Series) -> str:
    """Median, lowest and highest of a figure."""
    median, low, high = _numbers(values.median(), values.min(), values.max())
    return median if low == high else f"{median} ({low} to {high})"


def _sum_up(name: str, values: Series) -> str:
    """What all seeds cost together; the speed is a median."""
    return in_short(values.median() if name == "tokens/s" else values.sum())


def _with_deviation(name: str, values: Series) -> str:
    """Mean and standard deviation of a figure."""
    average, deviation = _numbers(values.mean(), results.deviation(values))
    return f"{average} ± {deviation}" if len(values) > 1 else average


def _numbers(*values: float) -> list[str]:
    """Four digits after the point of a loss, two of a score or perplexity, as the first one is."""
    digits = 4 if abs(values[0]) < 10 else 2
    return [f"{value:.{digits}f}" for value in values]


def _comparison(
    title: str, study: Study, checked: Mapping[Arm, Checked], measured: Measured
) -> str:
    """Return a table of the differences of arms that differ in one factor."""
    names = [name for name in results.names_of(measured) if name != results.COLLAPSED]
    rows, confounded, intervals, seeds = [], list[str](), 0, 0
    for one, other in comparisons(measured, study.best, study.pairs):
        found = results.paired(measured, one, other).reindex(names, fill_value=math.nan)
        seeds = max(seeds, int(found["seeds"].max()))
        intervals += found["half_width"].count()
        pair = f"{other.name} − {one.name}"
        rows.append([pair, *map(_difference, found["mean"], found["half_width"])])
        if len(settings := _settings_that_differ(checked, one, other)) > 1:
            confounded.append(f"- {pair}: {', '.join(settings)}")
    if not rows:
        return ""
    notes = [
        f"Mean over at most {seeds} seeds that both arms have, with the 95 % interval of Student's "
        "t, which equal differences do not give; **bold** where it leaves out 0. One in twenty of "
        f"these {intervals} intervals leaves out 0 by chance.\n"
        if seeds > 1
        else "Of one seed, which gives no interval.\n"
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


def _settings_that_differ(checked: Mapping[Arm, Checked], one: Arm, other: Arm) -> list[str]:
    """Return the settings of pretraining and fine-tuning in which two arms differ."""
    factors = len(next(iter(checked)).levels)
    both = (checked[Arm(arm.levels[:factors], {})] for arm in (one, other))
    settings = differences(*both)
    if len(one.levels) > factors:  # with a way of fine-tuning
        settings += sorted(key for key, *_ in changes(one.settings, other.settings))
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
    caption = "Mean and standard deviation over seeds."
    caption += " Scores of collapsed runs count." * (results.COLLAPSED in names)
    return str(table.to_latex(escape=True, caption=caption))


CURVES, LENGTHS = ("curves.png", "curves.svg"), ("lengths.png", "lengths.svg")
"""Names of the pictures."""
_SMOOTHED = 0.02
"""Share of the steps that a point of the training loss is the mean of."""
_FIRST = 0.02
"""Share of the tokens that is not drawn: the fall at the start would flatten all that follows."""
_POINTS = 400
"""About so many of a curve are drawn."""


def draw_curves(curves: Mapping[Arm, Sequence[Curve]], output: Path) -> None:
    """Draw training and validation loss by tokens: the mean over the seeds, and their range."""
    from matplotlib.ticker import LogLocator

    with pictures.picture(10, 4.6, *(output / name for name in CURVES)) as figure:
        left, right = figure.subplots(1, 2)
        for arm, of_seeds in curves.items():
            width = int(_SMOOTHED * len(of_seeds[0].losses)) | 1
            _draw_losses(left, [(c.tokens, smoothed(c.losses, width)) for c in of_seeds], arm.name)
            _draw_losses(right, [(c.measured_at, c.validation) for c in of_seeds], arm.name)
        left.set(title="training, smoothed; mean and range of seeds", ylabel="nats per target")
        right.set(title="validation; mean and range of seeds")
        for axes in (left, right):
            axes.set(xlabel="tokens", xscale="log")
            axes.xaxis.set_major_formatter(lambda value, place: in_short(value))
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.minorticks_off()
        pictures.legend_below(figure)


def _draw_losses(axes: "Axes", curves: Sequence[tuple[Sequence[int], Any]], label: str) -> None:
    """Draw losses by tokens of several seeds, as far as all of them have come."""
    shortest = min(len(losses) for _, losses in curves)
    chosen = slice(None, shortest, max(1, shortest // _POINTS))
    tokens, losses = (np.array([one[chosen] for one in each]) for each in zip(*curves, strict=True))
    places = tokens.mean(axis=0)
    drawn = places >= _FIRST * max(places, default=0.0)
    _band(axes, places[drawn], losses[:, drawn], label)


def _band(axes: "Axes", places: Any, lines: Any, label: str, marker: str = "") -> None:  # noqa: ANN401 - arrays
    (line,) = axes.plot(places, lines.mean(axis=0), label=label, marker=marker)
    if len(lines) > 1:
        low, high = lines.min(axis=0), lines.max(axis=0)
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, lw=0)


def draw_lengths(measured: Measured, output: Path) -> None:
    """Draw perplexity by the length of the input, if it was measured at several lengths."""
    by_corpus: dict[str, dict[str, int]] = {}
    for name in results.names_of(measured):
        if found := re.fullmatch(r"perplexity(?: (on .+))?, ([\d,]+) tokens", name):
            by_corpus.setdefault(found[1] or "", {})[name] = int(found[2].replace(",", ""))
    lengths = sorted({length for columns in by_corpus.values() for length in columns.values()})
    if len(lengths) < 2:
        return
    with pictures.picture(6, 4.6, *(output / name for name in LENGTHS)) as figure:
        axes = figure.subplots()
        axes.set(title="mean and range of seeds", ylabel="perplexity")
        pictures.axis_of_lengths(axes, lengths)
        both = itertools.product(measured.items(), by_corpus.items())
        for (arm, frame), (corpus, columns) in both:
            # Learned positions end, and a run may not be evaluated yet.
            lines = frame[[name for name in columns if name in frame]].dropna()
            places = [columns[name] for name in lines.columns]
            if len(lines) and places:
                _band(axes, places, lines.to_numpy(), f"{arm.name} {corpus}".strip(), "o")
        pictures.legend_below(figure)
