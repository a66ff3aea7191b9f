"""Pictures of the report: the benchmark's scores by epoch, and ours beside the published ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.common import pictures
from finetune import benchmarks, published, scores
from finetune.plan import WEIGHTS
from finetune.task import Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "report.png"
EPOCHS = "epochs.png"
_COLUMNS = 5
_MOST_TICKS = 10
_PUBLISHED_COLORS = {
    "baseline": pictures.GREY,
    "learned-clap": pictures.ORANGE,
    "alibi": pictures.PURPLE,
    "zero-clap": pictures.LIGHT_BLUE,
}
_COLORS = {"pretrained": pictures.BLUE, "random": pictures.RED}


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
    found = {result["task"]: benchmarks.of_result(result) for result in results}
    tasks = [n for n in dict.fromkeys([*benchmarks.TASKS, *sorted(found)]) if n in found]
    tasks = [name for name in tasks if draw_task is _draw_epochs or name in benchmarks.TASKS]
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    with pictures.picture(path, max(6.0, 2.9 * columns), 3.1 * rows + 0.9) as figure:
        for place, task in enumerate(tasks, start=1):
            axes = figure.add_subplot(rows, columns, place)
            draw_task(axes, found[task], [r for r in results if r["task"] == task])
            axes.plot([], [], "o", color="black", mfc="white", ls="none", label="hollow: collapsed")
            axes.set_title(task)
        pictures.legend_below(figure, columns=min(4, 1 + columns))


def _draw_epochs(axes: Axes, task: Task, runs: Sequence[Mapping[str, Any]]) -> None:
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
    last = max(run["epochs"][-1]["epoch"] for run in runs)
    axes.set_xticks(range(1, last + 1, 1 + (last - 1) // _MOST_TICKS))
    axes.set_xlim(0.5, last + 0.5)
    axes.set(xlabel="epoch", ylabel=f"{scores.title(official)}, %")


def _draw_task(axes: Axes, task: Task, runs: Sequence[Mapping[str, Any]]) -> None:
    scale = 1 if task.is_regression else 100
    groups: dict[str, list[tuple[float, str, str, bool, str]]] = {}
    for model, printed in published.table().items():
        size, variant = model.split()
        if task.name in printed:
            value = printed[task.name]
            collapsed = published.looks_collapsed(task.name, value)
            mark = (value, "o", _PUBLISHED_COLORS[variant], collapsed, variant)
            groups.setdefault(f"published,\n{size}", []).append(mark)
    for weights in WEIGHTS:
        for run in runs:
            if run["weights"] == weights:
                value, collapsed = scale * task.first_metric(run), bool(run["collapsed"])
                mark = (value, "D", _COLORS[weights], collapsed, f"ours, {weights}")
                groups.setdefault(f"ours,\n{weights}", []).append(mark)
    for place, marks in enumerate(groups.values()):
        for number, mark in enumerate(marks):
            # Beside each other, so that equal scores do not hide each other.
            _mark(axes, place + 0.16 * (number - (len(marks) - 1) / 2), *mark)
    constant = scale * runs[0]["majority"][task.metrics[0]]
    axes.axhline(constant, color="black", ls=":", lw=1, label="best constant answer")
    axes.set_ylabel("loss (lower is better)" if task.is_regression else "accuracy, %")
    axes.set_xticks(range(len(groups)), [*groups], fontsize=7)
    axes.set_xlim(-0.6, len(groups) - 0.4)


def _mark(
    axes: Axes, x: float, y: float, marker: str, color: str, hollow: bool, label: str | None
) -> None:
    fill, name = ("white", None) if hollow else (color, label)
    axes.plot(x, y, marker, ms=5, color=color, mfc=fill, ls="none", label=name)
