"""What the pictures of a run show: its curves, and where it went back or changed its settings."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from data_prep.common import pictures
from pretrain.records import ledger, metrics
from pretrain.records.metrics import Line, finite_or_nan
from pretrain.records.status import RunView

_SMOOTHED = 0.01
"""Share of the steps that a point of the strong curve is the mean of."""
_ROOM_ABOVE = 2.0
"""The axis of abandoned values is at most so many times as long as that of surviving ones."""
_APART = 0.02
"""Numbers of marks nearer than this share of the axis are written beside each other."""
Floats = npt.NDArray[np.float64]
Value = Callable[[Line], float]


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


def numbers_of_marks(steps: Sequence[float], length: float) -> dict[float, str]:
    """The numbers of marks by the place to write them at, of near ones beside each other.

    Args:
        steps: where the marks are, or tokens.
        length: of the axis, in the same unit.
    """
    names: dict[float, list[str]] = {}
    for number, step in enumerate(steps, start=1):
        place = next((p for p in names if abs(p - step) < _APART * length), step)
        names.setdefault(place, []).append(str(number))
    return {place: ",".join(numbers) for place, numbers in names.items()}


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values of some lines of metrics.jsonl or validation.jsonl."""

    kind: str
    """RAW, SMOOTHED, VALIDATION or ABANDONED."""
    label: str
    """What a legend calls it; several curves may share one."""
    lines: Sequence[Line]
    values: Floats
    """One for each line; NaN where there is no finite one."""

    @property
    def steps(self) -> list[int]:
        """Of the lines."""
        return [line["step"] for line in self.lines]


RAW, SMOOTHED, VALIDATION, ABANDONED = "raw", "smoothed", "validation", "abandoned"


@dataclasses.dataclass(frozen=True)
class Panel:
    """Curves that share an axis of values."""

    title: str
    unit: str
    curves: Sequence[Curve]
    ends: tuple[float, float]
    """Of the values to show; NaN without a finite one."""
    is_cut: bool = False
    """Whether curves of abandoned steps go on above."""


def loss_panels(seen: RunView, lines: Sequence[Line]) -> list[Panel]:
    """The losses of training and validation: a panel for each term of the objective.

    Args:
        seen: the run, with at least one step.
        lines: of its metrics.jsonl, those of abandoned steps included.
    """
    terms = [*seen.lines[-1].get("terms", {})] or [""]
    return [
        panel(
            seen, lines, term, "nats per target", _term(term) if term else metrics.loss_of,
            name="training loss", validation=seen.validation,
        )
        for term in terms
    ]  # fmt: skip


def panel(
    seen: RunView,
    lines: Sequence[Line],
    title: str,
    unit: str,
    value: Value,
    *,
    name: str = "",
    validation: Sequence[Line] = (),
    smooth: bool = True,
) -> Panel:
    """A value of every step, by phase, with its mean over steps around, and of abandoned steps.

    Args:
        seen: the run, with at least one step.
        lines: of its metrics.jsonl, those of abandoned steps included.
        title: of the panel.
        unit: of the values.
        value: of a line.
        name: of the value, in labels; without one the title is.
        validation: lines of validation.jsonl that have the value.
        smooth: whether to show the mean.
    """
    width = int(_SMOOTHED * len(seen.lines)) | 1 if smooth else 1
    name = name or title
    strong = f"{name}, mean of {width:,} steps" if width > 1 else name
    kept: list[Curve] = []
    for _, part in itertools.groupby(seen.lines, lambda line: seen.config.phase(line["step"])):
        phase = [*part]
        values = np.array([value(line) for line in phase])
        if width > 1:
            kept.append(Curve(RAW, name, phase, values))
            values = smoothed(values, width)
        kept.append(Curve(SMOOTHED, strong, phase, values))
    kept += validation_curves(validation, value)
    survived = {(line["attempt"], line["step"]) for line in seen.lines}
    left = [line for line in lines if (line["attempt"], line["step"]) not in survived]
    low, high = ends([number for curve in kept for number in curve.values])
    end = high + (_ROOM_ABOVE - 1) * ((high - low) or abs(high))
    lowest, highest = ends([value(line) for line in left])
    is_cut = highest > end
    label = "abandoned steps" + f" (they leave the panel, to {highest:,.4g})" * is_cut
    abandoned = [
        Curve(ABANDONED, label, part, np.array([value(line) for line in part]))
        for part in ([*part] for _, part in itertools.groupby(left, lambda line: line["attempt"]))
    ]
    shown = ends([low, lowest])[0], end if is_cut else ends([high, highest])[1]
    return Panel(title, unit, [*kept, *abandoned], shown, is_cut)


def validation_curves(validation: Sequence[Line], value: Value) -> list[Curve]:
    """A curve for each stretch of evaluations that measured the same, and can be compared."""
    stretches = [[*s] for _, s in itertools.groupby(validation, lambda line: line.get("measure"))]
    label = "validation loss" + ", broken where it measures other blocks" * (len(stretches) > 1)
    return [
        Curve(VALIDATION, label, lines, np.array([value(line) for line in lines]))
        for lines in stretches
    ]


def corpora(validation: Sequence[Line]) -> dict[str, Value]:
    """The validation loss on each corpus that was measured at several steps.

    Of several terms it is that of the first one, the tokens.
    """

    def of(name: str) -> Value:
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


def tokens_before(lines: Sequence[Line]) -> Callable[[Sequence[float]], Floats]:
    """Return how many tokens were read before given steps, from the lines of surviving steps."""
    ends = [lines[0]["step"], *(line["step"] + 1 for line in lines)]
    read = np.cumsum([0, *(line["tokens"] for line in lines)])
    return lambda steps: np.asarray(np.interp(steps, ends, read))


def smoothed(values: npt.ArrayLike, width: int) -> Floats:
    """The mean of up to `width` finite values around each one, an odd number; NaN without any."""
    found = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(found)
    half = width // 2
    around = np.arange(len(found))
    first, end = np.maximum(around - half, 0), np.minimum(around + half + 1, len(found))

    def sums(of: Floats) -> Floats:
        upto = np.concatenate([[0.0], np.cumsum(of)])
        return np.asarray(upto[end] - upto[first])

    numbers = sums(finite.astype(np.float64))
    totals = sums(np.where(finite, found, 0.0))
    return np.where(numbers > 0, totals / np.maximum(numbers, 1), np.nan)


def _term(name: str) -> Value:
    """The loss of one of several terms."""
    return lambda line: finite_or_nan(line.get("terms", {}).get(name, {}).get("loss"))


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest finite value; NaN without any."""
    finite = [value for value in values if math.isfinite(value)]
    return float(min(finite, default=math.nan)), float(max(finite, default=math.nan))
