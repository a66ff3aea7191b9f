"""The pictures of a study: its curves with bands over the seeds, and perplexity by length."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.common import pictures
from data_prep.common.wording import in_short
from finetune.studies.results import Curve, Measured, names_of
from finetune.studies.study import Arm
from pretrain.records.plots import smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES, LENGTHS = "curves", "lengths"
"""Names of the pictures, which are written in each of `_FORMATS`."""
_FORMATS = (".png", ".svg")
_SMOOTHED = 0.02
"""Share of the steps that a point of the training loss is the mean of."""
_FIRST = 0.02
"""Share of the tokens that is not drawn: the fall at the start would flatten all that follows."""
_POINTS = 400
_LINES = ("-", "--", ":", "-.")


def _kind(number: int) -> dict[str, Any]:
    """Return the colour and the kind of line of an arm."""
    rounds, color = divmod(number, len(pictures.CYCLE))
    return {"color": pictures.CYCLE[color], "linestyle": _LINES[rounds % len(_LINES)]}


def draw_curves(curves: Mapping[Arm, Sequence[Curve]], output: Path) -> None:
    """Draw training and validation loss by tokens: the mean over the seeds, and their range."""
    from matplotlib.ticker import LogLocator

    for suffix in _FORMATS:
        with pictures.picture(output / f"{CURVES}{suffix}", 10, 4.6) as figure:
            left, right = figure.subplots(1, 2)
            for number, (arm, of_seeds) in enumerate(curves.items()):
                _training(left, of_seeds, arm.name, _kind(number))
                _validation(right, of_seeds, arm.name, _kind(number))
            left.set(title="training, smoothed", ylabel="nats per target")
            right.set(title="validation")
            for axes in (left, right):
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(lambda value, place: in_short(value))
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.minorticks_off()
                axes.set_xlabel("tokens")
            pictures.legend_below(figure)


def _training(axes: Axes, curves: Sequence[Curve], label: str, kind: Mapping[str, Any]) -> None:
    last = min(curve.tokens[-1] for curve in curves)
    places = np.geomspace(max(1.0, _FIRST * last), last, _POINTS)
    lines = []
    for curve in curves:
        width = int(_SMOOTHED * len(curve.losses)) | 1
        lines.append(np.interp(places, curve.tokens, smoothed(curve.losses, width)))
    _band(axes, places, np.array(lines), label, kind)


def _validation(axes: Axes, curves: Sequence[Curve], label: str, kind: Mapping[str, Any]) -> None:
    measured = min(len(curve.validation) for curve in curves)
    places = np.mean([curve.measured_at[:measured] for curve in curves], axis=0)
    drawn = places >= _FIRST * max(places, default=0.0)
    lines = np.array([curve.validation[:measured] for curve in curves])
    _band(axes, places[drawn], lines[:, drawn], label, kind)


def _band(axes: Axes, places: Any, lines: Any, label: str, kind: Mapping[str, Any]) -> None:  # noqa: ANN401 - arrays
    axes.plot(places, lines.mean(axis=0), label=label, **kind)
    if len(lines) > 1:
        low, high = lines.min(axis=0), lines.max(axis=0)
        axes.fill_between(places, low, high, color=kind["color"], alpha=0.15, lw=0)


def draw_lengths(measured: Measured, output: Path) -> None:
    """Draw perplexity by the length of the input, if it was measured at several lengths."""
    by_corpus: dict[str, dict[str, int]] = {}
    for name in names_of(measured):
        if found := re.fullmatch(r"perplexity(?: (on .+))?, ([\d,]+) tokens", name):
            by_corpus.setdefault(found[1] or "", {})[name] = int(found[2].replace(",", ""))
    lengths = sorted({length for columns in by_corpus.values() for length in columns.values()})
    if len(lengths) < 2:
        return
    for suffix in _FORMATS:
        with pictures.picture(output / f"{LENGTHS}{suffix}", 6, 4.6) as figure:
            axes = figure.subplots()
            both = itertools.product(measured.items(), by_corpus.items())
            for number, ((arm, frame), (corpus, columns)) in enumerate(both):
                # Learned positions end, and a run may not be evaluated yet.
                lines = frame[[name for name in columns if name in frame]].dropna()
                places = [columns[name] for name in lines.columns]
                if len(lines) and places:
                    kind = {**_kind(number), "marker": "o"}
                    _band(axes, places, lines.to_numpy(), f"{arm.name} {corpus}".strip(), kind)
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axes.minorticks_off()
            axes.set(xlabel="tokens of the input", ylabel="perplexity")
            pictures.legend_below(figure)
