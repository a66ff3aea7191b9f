"""loss.png: the loss curves of a run, with its rollbacks and abandoned attempts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config.load import RUN_FILE, load
from pretrain.records import ledger, metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS_PLOT = "loss.png"
_LINE_HEIGHT, _LINES = 0.05, 8
"""Height of a line of text as a share of the picture's, and the number of lines that fit."""

_COLOURS = ("black", "tab:green", "tab:purple", "tab:orange")
"""Of validation losses; those of one colour measured the same."""


def plot_loss(run: Path) -> Path:
    """Draw the training and validation loss of a run; returns the picture's path.

    Raises:
        ValueError: the run has no metrics yet.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = metrics.read(run / metrics.METRICS)
    if not records:
        raise ValueError(f"{run / metrics.METRICS}: has no steps to draw")
    kept = metrics.surviving(records)
    survived = {(r["attempt"], r["step"]) for r in kept}
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    abandoned = [r for r in records if (r["attempt"], r["step"]) not in survived]
    for number, attempt in enumerate(sorted({r["attempt"] for r in abandoned})):
        part = [r for r in abandoned if r["attempt"] == attempt]
        label = "abandoned steps" if number == 0 else None
        axes.plot(*_losses(part), color="tab:red", alpha=0.6, lw=1, label=label)
    axes.plot(*_losses(kept), color="tab:blue", lw=1, label="training loss")
    validation = metrics.surviving_validation(metrics.read(run / metrics.VALIDATION), kept)
    _plot_validation(axes, validation)
    rollbacks = [r for r in ledger.read(run / ledger.FILE_NAME) if r["kind"] == "rollback"]
    for number, record in enumerate(rollbacks):
        axes.axvline(record["step"], color="tab:red", ls="--", lw=1)
        axes.text(
            record["step"],
            0.99 - _LINE_HEIGHT * (number % _LINES),  # staggered: their steps may be close
            f" {number + 1}. back to {record['step']:,}, {_change(record)}",
            transform=axes.get_xaxis_transform(),
            color="tab:red",
            va="top",
            fontsize=9,
        )
    config = load(str(run / RUN_FILE)) if (run / RUN_FILE).is_file() else None
    for phase in config.resolved_phases[1:] if config else ():
        axes.axvline(phase.first_step, color="tab:gray", ls=":", lw=1)
        axes.text(
            phase.first_step,
            0.01,
            f" {phase}",
            transform=axes.get_xaxis_transform(),
            color="tab:gray",
            fontsize=9,
        )
    axes.set(xlabel="step", ylabel="nats per target", title=run.name)
    axes.legend(loc="lower left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path = run / LOSS_PLOT
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _plot_validation(axes: Axes, validation: Sequence[dict[str, Any]]) -> None:
    """Draw a curve for each stretch of evaluations that measured the same, and can be compared."""
    colours: dict[str | None, str] = {}
    for measure, group in itertools.groupby(validation, lambda line: line.get("measure")):
        lines, label = list(group), None
        if measure not in colours:
            label = "validation loss"
            label += f", other blocks from step {lines[0]['step']:,}" if colours else ""
            colours[measure] = _COLOURS[len(colours) % len(_COLOURS)]
        axes.plot(*_losses(lines), "o-", color=colours[measure], ms=4, lw=1, label=label)


def _change(rollback: ledger.Record) -> str:
    """What a rollback changed."""
    text = f"seed {rollback['seed']}"
    if rollback["skip"]:
        text += ", data skipped"
    if rollback["learning_rate_steps"]:
        text += f", {rollback['learning_rate_factor']:g} x learning rate"
    return text


def _losses(lines: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Steps and losses."""
    return [line["step"] for line in lines], [line["loss"] for line in lines]
