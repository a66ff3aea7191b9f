"""loss.png and loss.svg: the losses of a run, where it went back, and where its phases began."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from data_prep.common import pictures
from pretrain.records import metrics
from pretrain.records.metrics import Line
from pretrain.records.status import RunView

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.axes import Axes

LOSS_PLOTS = ("loss.png", "loss.svg")
_SMOOTHED = 0.01
"""Share of the steps over which a point of the smoothed curve is averaged."""
_MOST_MARKS = 12
"""Marks that the legend explains; the report has all."""


def plot_loss(seen: RunView) -> None:
    """Draw a run's losses into LOSS_PLOTS: a panel for each term of the objective.

    Args:
        seen: the run, with at least one step.
    """
    terms = [*seen.lines[-1].get("terms", {})] or [""]
    paths = (seen.folder / name for name in LOSS_PLOTS)
    with pictures.picture(9, 1.5 + 3.4 * len(terms), *paths) as figure:
        panels = figure.subplots(len(terms), squeeze=False, sharex=True)[:, 0]
        for axes, term in zip(panels, terms, strict=True):
            _draw(axes, seen, _loss(term))
            axes.set(title=term, ylabel="nats per target")
            for number, (step, text, color) in enumerate(_marks(seen)):
                label = {"label": text} if number < _MOST_MARKS else {}
                axes.axvline(step, color=color, ls="--", lw=0.8, zorder=1, **label)
        panels[-1].set_xlabel("steps")
        panels[-1].xaxis.set_major_formatter("{x:,.0f}")
        figure.suptitle(seen.folder.resolve().name)
        pictures.legend_below(figure)


def _loss(term: str) -> Callable[[Line], float]:
    """The loss in a line: of a term, or without a name the whole."""
    if not term:
        return metrics.loss_of
    return lambda line: metrics.finite_or_nan(line.get("terms", {}).get(term, {}).get("loss"))


def _draw(axes: "Axes", seen: RunView, loss: Callable[[Line], float]) -> None:
    """Draw training and validation loss, and the training loss of the abandoned steps.

    Args:
        axes: of the panel.
        seen: the run.
        loss: in a line.
    """

    def draw(part: Sequence[Line], width: int = 1, **style: Any) -> None:  # noqa: ANN401 - a curve's style
        steps = [line["step"] for line in part]
        axes.plot(steps, smoothed([*map(loss, part)], width), ls="-", **style)

    width = int(_SMOOTHED * len(seen.lines)) | 1
    if width > 1:
        draw(seen.lines, color=pictures.BLUE, lw=0.6, alpha=0.35, label="training loss")
    label = f"training loss, mean of {width:,} steps" if width > 1 else "training loss"
    draw(seen.lines, width, color=pictures.BLUE, label=label)
    # Evaluations of other blocks are not comparable, and are another curve.
    for _, group in itertools.groupby(seen.validation, lambda line: line.get("validation_id")):
        draw([*group], color="black", lw=1, marker="o", ms=3, label="validation loss")
    low, high = axes.get_ylim()
    survived = {(line["attempt"], line["step"]) for line in seen.lines}
    left = [line for line in seen.all_lines if (line["attempt"], line["step"]) not in survived]
    for _, group in itertools.groupby(left, lambda line: line["attempt"]):
        # Above the others, and thin: after a crash the same losses are measured again.
        draw([*group], color=pictures.RED, lw=0.6, zorder=2.5, label="abandoned steps")
    # A spike may leave the panel, and does not flatten the rest.
    axes.set_ylim(top=min(axes.get_ylim()[1], 2 * high - low))


def _marks(seen: RunView) -> Iterator[tuple[int, str, str]]:
    """Yield the step, a text and a colour of each confirmed spike, and of each phase's begin."""
    answers = {record["onset"]: record for record in seen.state.rollbacks}
    for spike in seen.state.spikes:
        text = f"spike from {spike['onset']:,} on"
        if answer := answers.get(spike["onset"]):
            text += f": back to {answer['step']:,}, seed {answer['seed']}"
            text += ", data around it skipped" if answer["skip"] else ""
        yield spike["onset"], text, pictures.RED
    for part in seen.segments.parts[1:]:
        yield part.first_step, part.name or "another recipe", pictures.GREY


def smoothed(values: Sequence[float], width: int) -> "npt.NDArray[np.float64]":
    """The mean of up to `width` finite values around each one, an odd number; NaN without any."""
    import pandas

    found = pandas.Series(values, dtype=float)
    return found.rolling(width, center=True, min_periods=1).mean().to_numpy()
