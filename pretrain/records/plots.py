"""loss.png: the loss curves of a run, and where it went back, or changed its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.common import pictures
from data_prep.common.wording import in_short
from pretrain.records import curves, metrics
from pretrain.records.curves import Curve, Mark
from pretrain.records.metrics import Line
from pretrain.records.status import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS_PLOT = "loss.png"
_MOST_MARKS = 12
"""Marks that the legend explains; the report has all."""
_COLUMNS = 4
"""Most corpora beside each other."""
_STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        curves.RAW: {"color": pictures.BLUE, "lw": 0.6, "alpha": 0.35},
        curves.SMOOTHED: {"color": pictures.BLUE},
        curves.VALIDATION: {"color": "black", "lw": 1, "marker": "o", "ms": 3, "zorder": 2.6},
        # Above the others, and thin: after a crash the same losses are measured again.
        curves.ABANDONED: {"color": pictures.RED, "lw": 0.6, "zorder": 2.5},
    }
)


def plot_loss(seen: RunView, path: Path) -> None:
    """Draw a run's losses: a panel for each term of the objective, and for each corpus.

    Args:
        seen: the run, with at least one step.
        path: the picture; `pictures.FORMATS` has the accepted suffixes.
    """
    lines = metrics.read_metrics(seen.folder / metrics.METRICS)
    happened = curves.marks(seen, lines)
    panels = curves.loss_panels(seen, lines)
    corpora = curves.corpora(seen.validation)
    columns = min(_COLUMNS, len(corpora)) or 1
    heights = [3.4] * len(panels) + [1.8] * -(-len(corpora) // columns)
    with pictures.picture(path, 9, 1.2 + sum(heights) + 0.09 * len(happened)) as figure:
        grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
        for row, panel in enumerate(panels):
            axes = figure.add_subplot(grid[row, :])
            _draw(axes, panel.curves)
            if panel.is_cut:
                axes.set_ylim(panel.ends[0] - 0.03 * np.ptp(panel.ends), panel.ends[1])
            _mark(axes, happened, numbered=row == 0)
            _steps_and_tokens(axes, seen.lines)
            axes.set(ylabel=panel.unit, title=panel.title)
        for number, (name, loss) in enumerate(corpora.items()):
            axes = figure.add_subplot(grid[len(panels) + number // columns, number % columns])
            _draw(axes, curves.validation_curves(seen.validation, loss))
            _mark(axes, happened, numbered=False)
            axes.set(title=f"validation: {name}", xlim=figure.axes[0].get_xlim())
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.locator_params(axis="x", nbins=4, integer=True)
        figure.suptitle(seen.folder.resolve().name)
        pictures.legend_below(figure)


def _draw(axes: Axes, found: Sequence[Curve]) -> None:
    for curve in found:
        axes.plot(curve.steps, curve.values, label=curve.label, **_STYLES[curve.kind])


def _mark(axes: Axes, happened: Sequence[Mark], numbered: bool) -> None:
    """Draw a line for each mark, and a band over the steps that were done again."""
    for number, mark in enumerate(happened, start=1):
        line = axes.axvline(mark.step, color=mark.color, ls="--", lw=0.8, zorder=1)
        if mark.again:
            ends = mark.again.start, mark.again.stop
            axes.axvspan(*ends, color=mark.color, alpha=0.12, lw=0, zorder=0.5)
        if numbered and number <= _MOST_MARKS:
            line.set_label(f"{number}: {mark.text}")
    if numbered:
        steps, length = [mark.step for mark in happened], float(np.ptp(axes.get_xlim()))
        for place, numbers in curves.numbers_of_marks(steps, length).items():
            at = axes.get_xaxis_transform()
            axes.text(place, 1.01, numbers, transform=at, ha="center", fontsize=8)


def _steps_and_tokens(axes: Axes, lines: Sequence[Line]) -> None:
    """Write below each tick how many tokens were read until then."""
    tokens = curves.tokens_before(lines)

    def label(step: float, _: float) -> str:
        within = lines[0]["step"] <= step <= lines[-1]["step"] + 1
        read = in_short(float(tokens([step])[0])) if within else ""
        return f"{step:,.0f}\n{read}"

    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter(label)
    axes.set_xlabel("steps; tokens that they read")
