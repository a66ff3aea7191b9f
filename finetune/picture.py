"""Pictures of the report: the benchmark's scores by epoch, and ours beside the published ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import benchmarks, published, scores
from finetune.plan import WEIGHTS
from finetune.task import Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "report.png"
EPOCHS = "epochs.png"
_COLUMNS = 5
_PUBLISHED_COLORS = {
    "baseline": "tab:gray",
    "learned-clap": "tab:olive",
    "alibi": "tab:purple",
    "zero-clap": "tab:cyan",
}
_COLORS = {"pretrained": "tab:blue", "random": "tab:orange"}
_GROUPS = ("published,\nbase", "published,\nlarge", "ours", "ours,\nrandom")


def draw_beside_published(folder: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Plot the published score of each task's runs into `folder`.

    Markers are hollow for collapsed runs and for published scores no better than a constant.
    """
    _draw(folder / PICTURE, results, _draw_task)


def draw_epochs(folder: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Plot the benchmark's score of each task's runs by epoch into `folder`.

    A marker shows the epoch whose model is kept; it is hollow for a collapsed run.
    """
    _draw(folder / EPOCHS, results, _draw_epochs)


def _draw(
    path: Path,
    results: Sequence[Mapping[str, Any]],
    draw_task: Callable[[Axes, Task, Sequence[Mapping[str, Any]]], None],
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {result["task"]: benchmarks.of_result(result) for result in results}
    tasks = [name for name in [*benchmarks.TASKS, *sorted(found)] if name in found]
    tasks = [name for name in tasks if draw_task is _draw_epochs or name in benchmarks.TASKS]
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(max(6.0, 2.9 * columns), 3.1 * rows + 0.9),
        layout="constrained",
        squeeze=False,
    )
    labels: dict[str, Any] = {}
    for axes in grid.flat[len(tasks) :]:
        axes.set_axis_off()
    for axes, task in zip(grid.flat, tasks, strict=False):
        draw_task(axes, found[task], [r for r in results if r["task"] == task])
        axes.plot([], [], "o", color="black", mfc="white", ls="none", label="hollow: collapsed")
        axes.set_title(task, fontsize=10)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    figure.legend(
        labels.values(),
        labels.keys(),
        loc="outside lower center",
        ncols=min(4, 2 * columns),
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_epochs(axes: Axes, task: Task, runs: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    official = task.official
    for run in runs:
        color = _COLORS[run["weights"]]
        epochs = [epoch["epoch"] for epoch in run["epochs"]]
        values = [100 * scores.mean(epoch, official) for epoch in run["epochs"]]
        label = f"{run['weights']}, retry" if run["retry"] else run["weights"]
        axes.plot(epochs, values, ls="--" if run["retry"] else "-", lw=1, color=color, label=label)
        best = run["best"]["epoch"]
        value = values[epochs.index(best)]
        _mark(axes, best, value, "D", color, bool(run["collapsed"]), None)
    constant = 100 * scores.mean(runs[0]["majority"], official)
    axes.axhline(constant, color="black", ls=":", lw=1, label="best constant answer")
    axes.plot([], [], "D", color="black", ls="none", label="epoch of the kept model")
    axes.set_ylabel(f"{scores.title(official)}, %", fontsize=8)
    axes.set_xlabel("epoch", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_task(axes: Axes, task: Task, runs: Sequence[Mapping[str, Any]]) -> None:
    scale = 1 if task.is_regression else 100
    for model, printed in published.table().items():
        size, variant = model.split()
        if task.name in printed:
            x = ("base", "large").index(size) + _offset(list(_PUBLISHED_COLORS), variant)
            collapsed = published.looks_collapsed(task.name, printed[task.name])
            _mark(axes, x, printed[task.name], "o", _PUBLISHED_COLORS[variant], collapsed, variant)
    for weights in WEIGHTS:
        group = [run for run in runs if run["weights"] == weights]
        for number, run in enumerate(group):
            x = 2 + WEIGHTS.index(weights) + _offset(range(len(group)), number)
            value, collapsed = scale * task.first_metric(run), bool(run["collapsed"])
            _mark(axes, x, value, "D", _COLORS[weights], collapsed, f"ours, {weights}")
    constant = scale * runs[0]["majority"][task.metrics[0]]
    axes.axhline(constant, color="black", ls=":", lw=1, label="best constant answer")
    axes.set_ylabel("loss (lower is better)" if task.is_regression else "accuracy, %", fontsize=8)
    axes.set_xticks(range(len(_GROUPS)), _GROUPS, fontsize=7)
    axes.set_xlim(-0.6, len(_GROUPS) - 0.4)


def _offset(items: Sequence[object], item: object) -> float:
    """Return an offset around a group's middle, so that equal scores do not hide each other."""
    return 0.16 * (items.index(item) - (len(items) - 1) / 2)


def _mark(
    axes: Axes, x: float, y: float, marker: str, color: str, hollow: bool, label: str | None
) -> None:
    fill, name = ("white", None) if hollow else (color, label)
    axes.plot(x, y, marker, ms=5, color=color, mfc=fill, ls="none", label=name)
