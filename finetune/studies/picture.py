"""The pictures of a study: its curves with bands over the seeds, and perplexity by length."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.common import pictures
from data_prep.common.wording import in_short
from finetune.studies.results import Curve, Measured
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


def styles(arms: Iterable[Arm]) -> dict[Arm, dict[str, Any]]:
    """Return a colour and a kind of line for each arm.

    The levels of the factor that has most of them have the colours; all else has the lines.
    """
    arms = [*arms]
    levels: dict[str, list[str]] = {}
    for factor, level in itertools.chain.from_iterable(arm.levels for arm in arms):
        if level not in levels.setdefault(factor, []):
            levels[factor].append(level)
    main = max(levels, key=lambda factor: len(levels[factor]))
    rest: list[tuple[tuple[str, str], ...]] = []
    found = {}
    for arm in arms:
        color = levels[main].index(dict(arm.levels)[main])
        others = tuple(each for each in arm.levels if each[0] != main)
        if others not in rest:
            rest.append(others)
        line = rest.index(others) + color // len(pictures.CYCLE)
        found[arm] = {
            "color": pictures.CYCLE[color % len(pictures.CYCLE)],
            "linestyle": _LINES[line % len(_LINES)],
        }
    return found


def draw_curves(curves: Mapping[Arm, Mapping[int, Curve]], output: Path) -> None:
    """Draw training and validation loss by tokens: the mean over the seeds, and their range."""
    from matplotlib.ticker import LogLocator

    kinds = styles(curves)
    for suffix in _FORMATS:
        with pictures.picture(output / f"{CURVES}{suffix}", 10, 4.6) as figure:
            left, right = figure.subplots(1, 2)
            for arm, by_seed in curves.items():
                _training(left, [*by_seed.values()], arm.name, kinds[arm])
                _validation(right, [*by_seed.values()], arm.name, kinds[arm])
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
    by_arm = {arm: _lengths(by_seed.values()) for arm, by_seed in measured.items()}
    lengths = sorted({length for found in by_arm.values() for length in found})
    if len(lengths) < 2:
        return
    kinds = styles(by_arm)
    for suffix in _FORMATS:
        with pictures.picture(output / f"{LENGTHS}{suffix}", 6, 4.6) as figure:
            axes = figure.subplots()
            for arm, found in by_arm.items():
                rows = [found[length] for length in sorted(found)]
                seeds = min(map(len, rows), default=0)
                if seeds:
                    lines = np.array([row[:seeds] for row in rows]).T
                    _band(
                        axes,
                        np.array(sorted(found)),
                        lines,
                        arm.name,
                        {**kinds[arm], "marker": "o"},
                    )
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axes.minorticks_off()
            axes.set(xlabel="tokens of the input", ylabel="perplexity")
            pictures.legend_below(figure)


def _lengths(by_seed: Iterable[Mapping[str, float]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for figures in by_seed:
        for name, value in figures.items():
            if match := re.fullmatch(r"perplexity, ([\d,]+) tokens", name):
                found.setdefault(int(match[1].replace(",", "")), []).append(value)
    return found
