"""The report as a picture: every run a dot, beside the original's numbers and the best constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import glue, published
from finetune.config import WEIGHTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "report.png"
_COLUMNS = 5
_VARIANTS = {
    "baseline": "tab:gray",
    "learned-clap": "tab:olive",
    "alibi": "tab:purple",
    "zero-clap": "tab:cyan",
}
_OURS = {"pretrained": "tab:blue", "random": "tab:orange"}
_PLACES = ("original,\nbase", "original,\nlarge", "ours", "ours,\nrandom")


def draw(folder: Path, results: Sequence[Mapping[str, Any]]) -> Path:
    """Draw the first metric of each task's runs into `folder`; returns the picture's path.

    What collapsed is hollow; of the original's, what scores no better than a constant.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [name for name in glue.TASKS if any(r["task"] == name for r in results)]
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(max(6.0, 2.9 * columns), 3.1 * rows + 0.9),
        layout="constrained",
        squeeze=False,
    )
    handles: dict[str, Any] = {}
    for axes in grid.flat[len(tasks) :]:
        axes.set_axis_off()
    for axes, task in zip(grid.flat, tasks, strict=False):
        _draw_task(axes, task, [r for r in results if r["task"] == task])
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(4, 2 * columns),
        frameon=False,
        fontsize=8,
    )
    path = folder / PICTURE
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _draw_task(axes: Axes, task: str, runs: Sequence[Mapping[str, Any]]) -> None:
    metric, is_regression = glue.find(task).metrics[0], glue.find(task).is_regression
    scale = 1 if is_regression else 100
    for model, scores in published.table().items():
        size, variant = model.split()
        if task in scores:
            column = ("base", "large").index(size) + _beside(list(_VARIANTS), variant)
            gone = published.looks_collapsed(task, scores[task])
            _dot(axes, column, scores[task], "o", _VARIANTS[variant], gone, variant)
    for weights in WEIGHTS:
        mine = [run for run in runs if run["weights"] == weights]
        for number, run in enumerate(mine):
            column = 2 + WEIGHTS.index(weights) + _beside(range(len(mine)), number)
            value, gone = scale * run["best"][metric], bool(run["collapsed"])
            _dot(axes, column, value, "D", _OURS[weights], gone, f"ours, {weights}")
    constant = scale * runs[0]["majority"][metric]
    axes.axhline(constant, color="black", ls=":", lw=1, label="best constant answer")
    axes.plot([], [], "o", color="black", mfc="white", ls="none", label="hollow: collapsed")
    axes.set_title(task, fontsize=10)
    axes.set_ylabel("loss (less is better)" if is_regression else "accuracy, %", fontsize=8)
    axes.set_xticks(range(len(_PLACES)), _PLACES, fontsize=7)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlim(-0.6, len(_PLACES) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)


def _beside(row: Sequence[object], item: object) -> float:
    """Side by side around a column's middle, so that equal scores are seen as several."""
    return 0.16 * (row.index(item) - (len(row) - 1) / 2)


def _dot(
    axes: Axes, column: float, value: float, marker: str, colour: str, hollow: bool, label: str
) -> None:
    axes.plot(
        column,
        value,
        marker,
        ms=5,
        color=colour,
        mfc="white" if hollow else colour,
        ls="none",
        label=None if hollow else label,
    )
