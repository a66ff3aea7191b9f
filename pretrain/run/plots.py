"""The loss of a run as a picture, rollbacks and abandoned attempts visible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.run import ledger, metrics

LOSS_PLOT = "loss.png"
_LINE, _LINES = 0.05, 8
"""Height of a line of text, as a share of the picture's, and how many there is room for."""


def plot_loss(run: Path) -> Path:
    """Draw training and validation loss of a run folder; returns the picture's path.

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
        axes.plot(*_columns(part, "loss"), color="tab:red", alpha=0.6, lw=1, label=label)
    axes.plot(*_columns(kept, "loss"), color="tab:blue", lw=1, label="training loss")
    validation = metrics.surviving_validation(metrics.read(run / metrics.VALIDATION), kept)
    if validation:
        axes.plot(
            *_columns(validation, "loss"), "o-", color="black", ms=4, lw=1, label="validation loss"
        )
    rollbacks = [r for r in ledger.read(run / ledger.FILE_NAME) if r["kind"] == "rollback"]
    for number, record in enumerate(rollbacks):
        axes.axvline(record["step"], color="tab:red", ls="--", lw=1)
        axes.text(
            record["step"],
            0.99 - _LINE * (number % _LINES),  # below each other, for their steps may be near
            f" {number + 1}. back to {record['step']:,}, {_change(record)}",
            transform=axes.get_xaxis_transform(),
            color="tab:red",
            va="top",
            fontsize=9,
        )
    axes.set(xlabel="step", ylabel="nats a masked token", title=run.name)
    axes.legend(loc="lower left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path = run / LOSS_PLOT
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _change(rollback: dict[str, Any]) -> str:
    words = f"seed {rollback['seed']}"
    if rollback["skip"]:
        words += ", data skipped"
    if rollback["learning_rate_steps"]:
        words += f", {rollback['learning_rate_factor']:g} x learning rate"
    return words


def _columns(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [r["step"] for r in records], [r[name] for r in records]
