"""loss.png: the loss curves of a run, and where it went back, or changed its settings."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_prep.common import pictures
from data_prep.common.wording import in_short
from pretrain.records import ledger, metrics
from pretrain.records.metrics import Line, finite_or_nan
from pretrain.records.status import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS_PLOT = "loss.png"
_SMOOTHED = 0.01
"""Share of the steps that a point of the strong curve is the mean of."""
_MOST_MARKS = 12
"""Marks that the legend explains; the report has all."""
_ROOM_ABOVE = 2.0
"""The axis of abandoned losses is at most so many times as long as that of surviving ones."""
_APART = 0.02
"""Numbers of marks nearer than this share of the axis are written beside each other."""
_COLUMNS = 4
"""Most corpora beside each other."""
Loss = Callable[[Line], float]


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: int
    text: str
    color: str
    again: range = range(0)
    """Steps that were done before it and then done again."""


def marks(seen: RunView, lines: Sequence[Line]) -> list[Mark]:
    """Where a run went back, in the order of time; then where phases began.

    Args:
        seen: the run.
        lines: of its metrics.jsonl, those of abandoned steps included.
    """
    names = [stream.name for stream in seen.config.streams]
    stages = itertools.pairwise(seen.config.weights())
    changes = []
    for phase, ((_, old), (_, new)) in zip(seen.config.resolved_phases[1:], stages, strict=True):
        weights = ", ".join(f"{n} {w:g}" for n, w in zip(names, new, strict=True) if w)
        text = f"{phase}: weights {weights}" if new != old else str(phase)
        changes.append(Mark(phase.first_step, text, pictures.GREY))
    return [*_returns(seen.records, lines), *changes]


def _returns(records: Sequence[ledger.Record], lines: Sequence[Line]) -> list[Mark]:
    """A mark for each time that steps were done again, and one for an unanswered spike."""
    ends: dict[int, int] = {line["attempt"]: line["step"] + 1 for line in lines}
    found: list[Mark] = []
    cause: ledger.Record | None = None
    reached: int = 0
    for record in records:
        kind = record["kind"]
        if kind in ("spike", "rollback") or kind in (*ledger.ENDINGS, "corruption") and not cause:
            cause = record
        elif kind == "attempt":
            again = range(record["step"], reached)
            if again or (cause and cause["kind"] == "rollback"):
                found.append(_return(cause, again))
            cause, reached = None, ends.get(record["attempt"], int(record["step"]))
    if cause and cause["kind"] in ("spike", "rollback"):  # no attempt since
        found.append(_return(cause, range(0)))
    return found


def _return(cause: ledger.Record | None, again: range) -> Mark:
    """The mark of a cause, and of the steps that were done again."""
    kind = cause["kind"] if cause else "crash"
    if cause is None or kind not in ("spike", "rollback"):
        name = {"corruption": "silent corruption"}.get(kind, kind)
        return Mark(again.stop, f"{name}: back to {again.start:,}", pictures.PURPLE, again)
    text = f"spike from {cause['onset']:,} on"
    if kind == "rollback":
        text += f": back to {cause['step']:,}, seed {cause['seed']}"
        text += ", data skipped" if cause["skip"] else ""
        if cause["learning_rate_steps"]:
            text += f", {cause['learning_rate_factor']:g} x learning rate"
    return Mark(cause["onset"], text, pictures.RED, again)


def plot_loss(seen: RunView, path: Path) -> None:
    """Draw a run's losses: a panel for each term of the objective, and for each corpus.

    Args:
        seen: the run, with at least one step.
        path: the picture; `pictures.FORMATS` has the accepted suffixes.
    """
    lines = metrics.read_metrics(seen.folder / metrics.METRICS)
    happened = marks(seen, lines)
    terms = [*seen.lines[-1].get("terms", {})] or [""]
    corpora = _corpora(seen.validation)
    columns = min(_COLUMNS, len(corpora)) or 1
    heights = [3.4] * len(terms) + [1.8] * -(-len(corpora) // columns)
    with pictures.picture(path, 9, 1.2 + sum(heights) + 0.09 * len(happened)) as figure:
        grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
        for row, term in enumerate(terms):
            axes = figure.add_subplot(grid[row, :])
            loss = _term(term) if term else metrics.loss_of
            _training(axes, seen, loss)
            _validation(axes, seen.validation, loss)
            _abandoned(axes, seen, lines, loss)
            _mark(axes, happened, numbered=row == 0)
            _steps_and_tokens(axes, seen.lines)
            axes.set(ylabel="nats per target", title=term)
        for number, (name, loss) in enumerate(corpora.items()):
            axes = figure.add_subplot(grid[len(terms) + number // columns, number % columns])
            _validation(axes, seen.validation, loss)
            _mark(axes, happened, numbered=False)
            axes.set(title=f"validation: {name}", xlim=figure.axes[0].get_xlim())
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.locator_params(axis="x", nbins=4, integer=True)
        figure.suptitle(seen.folder.resolve().name)
        pictures.legend_below(figure)


def _term(name: str) -> Loss:
    """The loss of one of several terms."""
    return lambda line: finite_or_nan(line.get("terms", {}).get(name, {}).get("loss"))


def _corpora(validation: Sequence[Line]) -> dict[str, Loss]:
    """The validation loss on each corpus that was measured at several steps.

    Of several terms it is that of the first one, the tokens.
    """

    def of(name: str) -> Loss:
        def loss(line: Line) -> float:
            score = line.get("corpora", {}).get(name)
            if score is None or not line.get("terms"):
                return finite_or_nan(score and score["loss"])
            return math.log(finite_or_nan(score["perplexity"]))

        return loss

    steps: dict[str, set[int]] = {}
    for line in validation:
        for name in line.get("corpora", {}):
            steps.setdefault(name, set()).add(line["step"])
    return {name: of(name) for name, measured in steps.items() if len(measured) > 1}


def _training(axes: Axes, seen: RunView, loss: Loss) -> None:
    """Draw the training loss of the surviving steps."""
    width = int(_SMOOTHED * len(seen.lines)) | 1
    strong = f"training loss, mean of {width} steps" if width > 1 else "training loss"
    for _, part in itertools.groupby(seen.lines, lambda line: seen.config.phase(line["step"])):
        phase = [*part]
        if width > 1:
            _curve(axes, phase, loss, pictures.BLUE, "training loss", lw=0.6, alpha=0.35)
        _curve(axes, phase, loss, pictures.BLUE, strong, width)


def _abandoned(axes: Axes, seen: RunView, lines: Sequence[Line], loss: Loss) -> None:
    """Draw the training loss of the other steps, in axes that hold what survives."""
    kept = {(line["attempt"], line["step"]) for line in seen.lines}
    left = [line for line in lines if (line["attempt"], line["step"]) not in kept]
    low, high = axes.get_ylim()
    end = low + _ROOM_ABOVE * (high - low)
    highest = max(filter(math.isfinite, map(loss, left)), default=low)
    label = "abandoned steps"
    label += f" (they leave the panel, to {highest:,.4g})" if highest > end else ""
    for _, part in itertools.groupby(left, lambda line: line["attempt"]):
        # Above the others, and thin: after a crash the same losses are measured again.
        _curve(axes, [*part], loss, pictures.RED, label, lw=0.6, zorder=2.5)
    if highest > end:
        axes.set_ylim(low, end)


def _curve(
    axes: Axes,
    lines: Sequence[Line],
    loss: Loss,
    color: str,
    label: str,
    width: int = 1,
    **style: Any,  # noqa: ANN401 - as matplotlib has them
) -> None:
    losses = smoothed([loss(line) for line in lines], width)
    axes.plot([line["step"] for line in lines], losses, color=color, label=label, **style)


def smoothed(values: Sequence[float], width: int) -> npt.NDArray[np.float64]:
    """The mean of up to `width` finite values around each one, an odd number; NaN without any."""
    found = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(found)
    half = width // 2
    around = np.arange(len(found))
    first, end = np.maximum(around - half, 0), np.minimum(around + half + 1, len(found))

    def sums(of: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        upto = np.concatenate([[0.0], np.cumsum(of)])
        return np.asarray(upto[end] - upto[first])

    numbers = sums(finite.astype(np.float64))
    totals = sums(np.where(finite, found, 0.0))
    return np.where(numbers > 0, totals / np.maximum(numbers, 1), np.nan)


def _validation(axes: Axes, validation: Sequence[Line], loss: Loss) -> None:
    """Draw a curve for each stretch of evaluations that measured the same, and can be compared."""
    stretches = [[*s] for _, s in itertools.groupby(validation, lambda line: line.get("measure"))]
    label = "validation loss" + ", broken where it measures other blocks" * (len(stretches) > 1)
    for lines in stretches:
        steps, losses = [line["step"] for line in lines], [loss(line) for line in lines]
        axes.plot(steps, losses, "o-", color="black", lw=1, ms=3, label=label, zorder=2.6)


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
        apart = _APART * np.ptp(axes.get_xlim())
        names: dict[float, list[str]] = {}
        for number, mark in enumerate(happened, start=1):
            place = next((p for p in names if abs(p - mark.step) < apart), mark.step)
            names.setdefault(place, []).append(str(number))
        for place, numbers in names.items():
            at = axes.get_xaxis_transform()
            axes.text(place, 1.01, ",".join(numbers), transform=at, ha="center", fontsize=8)


def _steps_and_tokens(axes: Axes, lines: Sequence[Line]) -> None:
    """Write below each tick how many tokens were read until then."""
    ends = [lines[0]["step"], *(line["step"] + 1 for line in lines)]
    read = np.cumsum([0, *(line["tokens"] for line in lines)])

    def label(step: float, _: float) -> str:
        within = ends[0] <= step <= ends[-1]
        return f"{step:,.0f}\n{in_short(float(np.interp(step, ends, read))) if within else ''}"

    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter(label)
    axes.set_xlabel("steps; tokens that they read")
