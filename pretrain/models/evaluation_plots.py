"""The pictures of `evaluate`."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pretrain.models.evaluate import Measured
from pretrain.models.layers import LayerChanges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROOM_ABOVE = 1.5
"""The perplexity axis ends at the highest value within the training length, times this."""


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


def short_number(value: float | None) -> str:
    """A perplexity in few characters; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1e6 else f"{value:.1e}"


def draw_scores(measured: Sequence[Measured]) -> bytes:
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
        points = found[-1].perplexity_by_position if found else {}
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
    return _png(figure)


def draw_layers(found: Mapping[str, LayerChanges]) -> bytes:
    """A PNG in the form of Figure 1 of Lan et al. 2020: a line for each model."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, each in found.items():
        numbers = range(1, len(each.layers) + 1)
        left.plot(numbers, [layer.distance for layer in each.layers], "o-", ms=4, label=name)
        right.plot(numbers, [layer.degrees for layer in each.layers], "o-", ms=4, label=name)
    left.set(title="distance of input and output", ylabel="L2 distance")
    right.set(title="angle between input and output", ylabel="angle (degrees)")
    for axes in (left, right):
        axes.set_xlabel("layer")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(framealpha=0.85, edgecolor="none", fontsize=8)
    return _png(figure)


def _png(figure: Figure) -> bytes:
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
        goes_on = f" (leaves the panel, to {short_number(curve.highest)})"
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
