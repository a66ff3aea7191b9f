"""The pictures of `evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_prep.common import pictures
from pretrain.models.layers import LayerChanges
from pretrain.models.scores import INTERVAL, Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOM_ABOVE = 1.5
"""The perplexity axis ends at the highest value within the training length, times this."""

_APART = 3.0
"""Points (1/72 inch) between the error bars of one curve and the next."""


@dataclasses.dataclass(frozen=True)
class _Curve:
    label: str
    color: str
    style: str
    points: dict[int, float]
    """Perplexity by length, or by the first position of a group, in order."""
    trained: int
    """Points up to this one are within the training length."""
    intervals: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Of the points that have one."""

    @property
    def tops(self) -> dict[int, float]:
        """The upper ends of the intervals, or the points without one."""
        return self.points | {at: high for at, (_, high) in self.intervals.items()}

    @property
    def highest(self) -> float:
        """The highest perplexity."""
        return max(self.points.values())


def short_number(value: float | None) -> str:
    """A perplexity in few characters; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1e6 else f"{value:.1e}"


def draw_scores(measured: Sequence[Measured], path: Path) -> None:
    """Draw the form of Figure 1 of Press et al. 2022, and perplexity by position beside it.

    The axes of perplexity end a little above the values within the training length; the legend
    says how far a curve goes on above. A panel without a curve of several points is left out.
    """
    by_length, by_position = [], []
    for number, each in enumerate(measured):
        name, color, trained = each.model, f"C{number}", each.trained_length
        found = each.evaluations
        points = {result.length: result.total.perplexity for result in found}
        intervals = {r.length: r.interval for r in found if r.interval}
        by_length.append(_Curve(name, color, "o-", points, trained, intervals))
        is_interpolated = any(result.interpolated for result in found)
        points = {
            result.length: (result.interpolated or result.total).perplexity
            for result in found
            if result.interpolated or (is_interpolated and result.length == trained)
        }
        intervals = {r.length: r.interpolated_interval for r in found if r.interpolated_interval}
        interpolated = f"{name}, interpolated"
        by_length.append(_Curve(interpolated, color, ".:", points, trained, intervals))
        points = found[-1].perplexity_by_position if found else {}
        by_position.append(_Curve(name, color, "o-", points, trained // 2))
    evaluations = [evaluation for each in measured for evaluation in each.evaluations]
    strides = {each.stride for each in evaluations if each.stride}
    kind = f"sliding windows, stride {strides.pop():,}" if strides else "non-overlapping windows"
    longest = {each.evaluations[-1].length for each in measured if each.evaluations}
    size = f"windows of {longest.pop():,} tokens" if len(longest) == 1 else "the longest windows"
    panels = [
        (_draw_by_length, by_length, f"by length, {kind}"),
        (_draw_by_position, by_position, f"by position, in {size}"),
    ]
    panels = [p for p in panels if any(len(curve.points) > 1 for curve in p[1])] or panels[:1]
    with pictures.picture(path, 5.5 * len(panels), 4.6 + 0.1 * len(measured)) as figure:
        parts = figure.subfigures(1, len(panels), squeeze=False)[0]
        for part, (draw, curves, title) in zip(parts, panels, strict=True):
            axes = part.subplots()
            axes.set(title=title, ylabel="perplexity")
            draw(axes, curves)
            pictures.legend_below(part)


def _draw_by_length(axes: Axes, curves: Sequence[_Curve]) -> None:
    _draw_curves(axes, curves, {})
    for curve in curves[::2]:
        _mark_training_length(axes, curve)
    axes.plot([], [], "D", color="black", mfc="white", label="training length")
    if any(curve.intervals for curve in curves):
        axes.plot([], [], "|", color="black", ms=8, label=INTERVAL)
    lengths = sorted({length for curve in curves for length in curve.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("inference length (tokens)")


def _draw_by_position(axes: Axes, curves: Sequence[_Curve]) -> None:
    edges = sorted({edge for curve in curves for edge in curve.points})
    axes.set_yscale("log")
    pictures.plain_numbers(axes.yaxis)
    _draw_curves(axes, curves, {edge: place for place, edge in enumerate(edges)})
    axes.set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges])
    axes.set_xlabel("tokens before the target in its window, from")


def draw_layers(found: Mapping[str, LayerChanges], path: Path) -> None:
    """Draw the form of Figure 1 of Lan et al. 2020: a line for each model."""
    from matplotlib.ticker import MaxNLocator

    with pictures.picture(path, 11, 4.6) as figure:
        left, right = figure.subplots(1, 2)
        for name, each in found.items():
            numbers = range(1, len(each.layers) + 1)
            left.plot(numbers, [layer.distance for layer in each.layers], "o-", label=name)
            right.plot(numbers, [layer.degrees for layer in each.layers], "o-", label=name)
        left.set(title="distance of input and output", ylabel="L2 distance")
        right.set(title="angle between input and output", ylabel="angle (degrees)")
        for axes in (left, right):
            axes.set_xlabel("layer")
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        pictures.legend_below(figure)


def _draw_curves(axes: Axes, curves: Sequence[_Curve], places: dict[int, int]) -> None:
    """Draw the curves that have points; `places` are those of points where not their own."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return
    within = [v for curve in curves for at, v in curve.tops.items() if at <= curve.trained]
    lowest = [
        min([*curve.points.values(), *(low for low, _ in curve.intervals.values())])
        for curve in curves
    ]
    end = min(
        _ROOM_ABOVE * max(within or lowest),
        1.05 * max(max(curve.tops.values()) for curve in curves),
    )
    for number, curve in enumerate(curves):
        x = [places.get(point, point) for point in curve.points]
        y = [min(value, 100 * end) for value in curve.points.values()]
        goes_on = f" (leaves the panel, to {short_number(curve.highest)})"
        label = curve.label + goes_on * (curve.highest > end)
        axes.plot(x, y, curve.style, color=curve.color, label=label)
        _draw_intervals(axes, curve, _APART * (number - (len(curves) - 1) / 2))
    axes.set_ylim(0.95 * min(lowest), end)


def _draw_intervals(axes: Axes, curve: _Curve, offset: float) -> None:
    """Draw error bars so many points (1/72 inch) beside the points, as those of models overlap."""
    from matplotlib.transforms import ScaledTranslation

    beside = axes.transData + ScaledTranslation(offset / 72, 0, axes.figure.dpi_scale_trans)
    for point, interval in curve.intervals.items():
        axes.vlines(point, *interval, color=curve.color, lw=1, transform=beside)


def _mark_training_length(axes: Axes, curve: _Curve) -> None:
    """Mark where the curve passes the training length."""
    lengths, length = list(curve.points), curve.trained
    if lengths and lengths[0] <= length <= lengths[-1]:
        value = np.interp(length, lengths, list(curve.points.values()))
        axes.plot(length, value, "D", color=curve.color, mfc="white", ms=8, zorder=3)
