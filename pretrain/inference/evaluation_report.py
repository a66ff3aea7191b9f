"""What `evaluate` shows and writes: tables, JSON, CSV and a picture."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.files import write_atomically
from pretrain.inference.evaluate import Evaluation, Refusal
from pretrain.run.checkpoints import write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOM_ABOVE = 1.5
"""The perplexity axis ends at the highest value within the training length, times this."""
_FEWEST_TARGETS = 100
"""Groups of positions with fewer are too noisy for the table and the picture."""
_COLUMNS = "model,trained length,length,stride,part,targets,loss,perplexity,accuracy"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The results of one model."""

    model: str
    """Its name in the picture and the files."""
    trained_length: int
    """Tokens of the blocks of its training."""
    results: list[Evaluation | Refusal] = dataclasses.field(default_factory=list)

    @property
    def evaluations(self) -> list[Evaluation]:
        """The results without refusals, by length."""
        found = [result for result in self.results if isinstance(result, Evaluation)]
        return sorted(found, key=lambda each: each.length)


def head(counted: str, interpolate: bool) -> str:
    """The first line of a table of `rows`.

    Args:
        counted: "windows" or "blocks".
        interpolate: with the column of position interpolation.
    """
    return (
        f"{'length':>8} {counted:>10} {'targets':>12} {'coverage':>9} {'loss':>8} "
        f"{'perplexity':>11} {'accuracy':>9}{' interpolated' if interpolate else ''}\n"
    )


def rows(result: Evaluation | Refusal, interpolate: bool) -> str:
    """Lines of the table: the total, and each subset where there are several."""
    if isinstance(result, Refusal):
        return f"{result.length:>8} refused: {result.refused}\n"
    first = f"{result.length:>8} {result.blocks:>10,}"
    lines = [(first, f"{result.coverage:.1%}", result.total, _interpolated(result, interpolate))]
    if len(result.subsets) > 1:
        lines += [(" " * len(first), "", score, f"  {s}") for s, score in result.subsets.items()]
    return "".join(
        f"{first} {score.targets:>12,} {coverage:>9} {score.loss:>8.4f} {score.perplexity:>11.2f} "
        f"{score.accuracy:>9.1%}{last}\n"
        for first, coverage, score, last in lines
    )


def _interpolated(result: Evaluation, interpolate: bool) -> str:
    if not interpolate:
        return ""
    return f"{result.interpolated.perplexity:>13.2f}" if result.interpolated else f"{'-':>13}"


def position_table(evaluations: Sequence[Evaluation]) -> str:
    """Perplexity by position in the window: a line for each length, a column for each group."""
    groups = [_by_position(each) for each in evaluations]
    edges = sorted({edge for found in groups for edge in found})
    if not edges:
        return ""
    title = "perplexity by the number of tokens before the target in its window, from\n"
    lines = [("length", *map(str, edges))]
    for each, found in zip(evaluations, groups, strict=True):
        lines.append((str(each.length), *(_number(found.get(edge)) for edge in edges)))
    return title + "".join(
        f"{first:>8}" + "".join(f" {cell:>9}" for cell in cells) + "\n" for first, *cells in lines
    )


def _by_position(evaluation: Evaluation) -> dict[int, float]:
    """Perplexity by the first position of a group, of groups with enough targets."""
    return {
        edge: score.perplexity
        for edge, score in evaluation.positions.items()
        if score.targets >= _FEWEST_TARGETS
    }


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1e6 else f"{value:.1e}"


def refusals(measured: Sequence[Measured]) -> list[str]:
    """Which lengths could not be measured, and why; with the model where there are several."""
    return [
        f"{each.model + ', ' if len(measured) > 1 else ''}length {result.length}: {result.refused}"
        for each in measured
        for result in each.results
        if isinstance(result, Refusal)
    ]


def write(
    measured: Sequence[Measured],
    json: Path | None = None,
    table: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Write the files that have a name."""
    if json:
        write_json(
            json,
            [
                {**dataclasses.asdict(result), "model": m.model, "trained_length": m.trained_length}
                for m in measured
                for result in m.results
            ],
        )
    if table:
        write_atomically(table, as_csv(measured).encode())
    if plot:
        write_atomically(plot, draw(measured))


def as_csv(measured: Sequence[Measured]) -> str:
    """A line for each score, but for those of subsets. What was refused has none."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(_COLUMNS.split(","))
    for each in measured:
        for result in each.evaluations:
            parts = {"all": result.total}
            if result.interpolated:
                parts["interpolated"] = result.interpolated
            parts |= {f"from {edge} tokens": score for edge, score in result.positions.items()}
            for part, score in parts.items():
                numbers = score.targets, score.loss, score.perplexity, score.accuracy
                where = result.length, result.stride or result.length, part
                lines.writerow([each.model, each.trained_length, *where, *numbers])
    return text.getvalue()


@dataclasses.dataclass(frozen=True)
class _Curve:
    label: str
    color: str
    style: str
    points: dict[int, float]
    """Perplexity by length, or by the first position of a group, in order."""
    trained: int
    """Points up to this one are within the training length."""

    @property
    def highest(self) -> float:
        """The highest perplexity."""
        return max(self.points.values())


def draw(measured: Sequence[Measured]) -> bytes:
    """A PNG in the form of Figure 1 of Press et al. 2022, and perplexity by position beside it.

    The axes of perplexity end a little above the values within the training length; the legend
    says how far a curve goes on above.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    by_length, by_position = [], []
    for number, each in enumerate(measured):
        name, color, trained = each.model, f"C{number % 10}", each.trained_length
        found = each.evaluations
        points = {result.length: result.total.perplexity for result in found}
        by_length.append(_Curve(name, color, "o-", points, trained))
        is_interpolated = any(result.interpolated for result in found)
        points = {
            result.length: (result.interpolated or result.total).perplexity
            for result in found
            if result.interpolated or (is_interpolated and result.length == trained)
        }
        by_length.append(_Curve(f"{name}, interpolated", color, ".:", points, trained))
        points = _by_position(found[-1]) if found else {}
        by_position.append(_Curve(name, color, "o-", points, trained // 2))
    edges = sorted({edge for curve in by_position for edge in curve.points})
    places = {edge: place for place, edge in enumerate(edges)}
    _draw_curves(left, by_length, {})
    for curve in by_length[::2]:
        _mark_training_length(left, curve)
    left.plot([], [], "D", color="black", mfc="white", label="training length")
    right.set_yscale("log")
    right.yaxis.set_major_formatter(ScalarFormatter())
    right.yaxis.set_minor_formatter(ScalarFormatter())
    _draw_curves(right, by_position, places)
    right.set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges])
    evaluations = [evaluation for each in measured for evaluation in each.evaluations]
    strides = {each.stride for each in evaluations if each.stride}
    kind = f"sliding windows, stride {strides.pop():,}" if strides else "non-overlapping windows"
    longest = {each.evaluations[-1].length for each in measured if each.evaluations}
    size = f"windows of {longest.pop():,} tokens" if len(longest) == 1 else "the longest windows"
    left.set(xlabel="inference length (tokens)", title=f"by length, {kind}")
    right.set(
        xlabel="tokens before the target in its window, from", title=f"by position, in {size}"
    )
    for axes in (left, right):
        axes.set_ylabel("perplexity")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(framealpha=0.85, edgecolor="none", fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _draw_curves(axes: Axes, curves: Sequence[_Curve], places: dict[int, int]) -> None:
    """Draw the curves that have points; `places` are those of points where not their own."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return
    within = [v for curve in curves for at, v in curve.points.items() if at <= curve.trained]
    lowest = [min(curve.points.values()) for curve in curves]
    end = min(_ROOM_ABOVE * max(within or lowest), 1.05 * max(curve.highest for curve in curves))
    for curve in curves:
        x = [places.get(point, point) for point in curve.points]
        y = [min(value, 100 * end) for value in curve.points.values()]
        goes_on = f" (leaves the panel, to {_number(curve.highest)})"
        label = curve.label + goes_on * (curve.highest > end)
        axes.plot(x, y, curve.style, color=curve.color, ms=4, lw=1.5, label=label)
    axes.set_ylim(0.95 * min(lowest), end)


def _mark_training_length(axes: Axes, curve: _Curve) -> None:
    """Mark where the curve passes the training length."""
    import numpy as np

    lengths, length = list(curve.points), curve.trained
    if lengths and lengths[0] <= length <= lengths[-1]:
        value = np.interp(length, lengths, list(curve.points.values()))
        axes.plot(length, value, "D", color=curve.color, mfc="white", ms=8, zorder=3)
