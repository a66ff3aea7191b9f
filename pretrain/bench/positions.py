"""The cost of each position method: `python -m pretrain bench --positions`.

Causal models that differ in the position method only, as ratios to sinusoidal positions beside
those of Press et al. 2022.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pretrain.bench import needs
from pretrain.bench.contenders import FORWARD, OURS, PLAIN, Case
from pretrain.bench.suite import Processes, deadline_after, device_name
from pretrain.bench.worker import Compared, compare, log

BASELINE = "sinusoidal"
METHODS = (BASELINE, "alibi", "rotary", "t5-bias", "learned", "none")
USES = {PLAIN: "training", FORWARD: "evaluation", OURS: "training through DeepSpeed"}
"""What each contender is measured for."""
_SECONDS = 10.0
PAPER = {
    512: {
        "sinusoidal": (28.5, 82.1, 15.3),
        "rotary": (20.0, 43.4, 17.8),
        "t5-bias": (14.4, 21.8, 16.9),
        "alibi": (28.3, 85.8, 15.3),
    },
    1024: {
        "sinusoidal": (26.0, 77.8, 19.2),
        "rotary": (17.7, 39.4, 22.8),
        "t5-bias": (13.0, 20.2, 20.9),
        "alibi": (25.8, 76.4, 19.3),
    },
    3072: {
        "sinusoidal": (15.3, 42.4, 15.1),
        "rotary": (11.5, 29.5, 17.8),
        "t5-bias": (4.3, 4.9, 15.9),
        "alibi": (15.5, 42.2, 15.2),
    },
}
"""Press et al. 2022, table 1, by tokens per row: thousand words/s in training and in evaluation,
and GB, on one V100."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A case with its figures beside the same case with sinusoidal positions."""

    case: Case
    compared: Compared | None
    problem: str
    """Empty if the case was measured."""

    @property
    def use(self) -> str:
        """A value of `USES`."""
        return USES[self.case.contender]

    @property
    def method(self) -> str:
        """The position method."""
        return self.case.architecture().position

    @property
    def paper_ratio(self) -> float | None:
        """The paper's ratio of speed, at its length nearest to ours."""
        in_evaluation = self.case.contender == FORWARD
        return _paper_ratio(self.method, self.case.length, 1 if in_evaluation else 0)

    @property
    def paper_memory_ratio(self) -> float | None:
        """The paper's ratio of memory, which it has for training."""
        in_evaluation = self.case.contender == FORWARD
        return None if in_evaluation else _paper_ratio(self.method, self.case.length, 2)

    def tokens_per_second(self) -> float:
        """Return tokens per second; 0 if the case was not measured."""
        return self.compared.tokens_per_second if self.compared else 0.0

    def ratio(self) -> float | None:
        """Return the median ratio of speed to the baseline."""
        return statistics.median(self.compared.ratios) if self.compared else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All outcomes on one device."""

    device: str
    torch: str
    outcomes: list[Outcome]

    def memory_ratio(self, outcome: Outcome) -> float | None:
        """Return the peak memory over that of sinusoidal positions in the same use."""
        of_use = (o for o in self.outcomes if o.case.contender == outcome.case.contender)
        baseline = next(of_use).compared
        if baseline is None or outcome.compared is None:
            return None
        return outcome.compared.peak_bytes / baseline.peak_bytes

    def figures(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        case = self.outcomes[0].case
        return {
            "device": self.device,
            "torch": self.torch,
            "size": case.size,
            "length": case.length,
            "rows": case.rows,
            "paper_length": _nearest_length(case.length),
            "methods": [
                {
                    "use": outcome.use,
                    "method": outcome.method,
                    "parameters": needs.parameters(outcome.case.architecture()),
                    **(dataclasses.asdict(outcome.compared) if outcome.compared else {}),
                    "ratio": outcome.ratio(),
                    "paper_ratio": outcome.paper_ratio,
                    "memory_ratio": self.memory_ratio(outcome),
                    "paper_memory_ratio": outcome.paper_memory_ratio,
                    "problem": outcome.problem,
                }
                for outcome in self.outcomes
            ],
        }


def cases(on_gpu: bool, size: str | None = None, length: int | None = None) -> list[Case]:
    """List the cases, most important first.

    Args:
        on_gpu: choose a model and micro-batches for a GPU rather than for a CPU.
        size: the model size.
        length: tokens per row; 512 by default.

    Raises:
        ValueError: an unknown size, or a length without room for text.
    """
    length, size = 512 if length is None else length, size or ("base" if on_gpu else "small")
    tokens, vocab_size = (32768, 50265) if on_gpu else (1024, 2000)
    rows = max(1, tokens // max(1, length))
    found = [
        Case(contender, size, f"causal-{method}", length, rows, "full", vocab_size)
        for contender in USES
        for method in (METHODS[:2] if contender == OURS else METHODS)
    ]
    found[0].architecture()  # refuses an unknown size
    return found


def run(
    todo: Sequence[Case],
    minutes: float,
    report: Callable[[Comparison], object] = lambda comparison: None,
) -> Comparison:
    """Measure each case beside sinusoidal positions, in a process of its own.

    Args:
        todo: the cases, most important first; in each use the first is sinusoidal.
        minutes: the limit; cases that do not fit are left out.
        report: called after each case with the outcomes so far.

    Raises:
        ValueError: the limit leaves no time at all.
    """
    deadline = deadline_after(minutes)
    comparison = Comparison(device_name(), torch.__version__, [])
    for number, case in enumerate(todo, start=1):
        if (left := deadline - time.monotonic()) > 0:
            log(f"case {number} of {len(todo)}, {left / 60:.1f} minutes left: {case.name()}")
        baseline = dataclasses.replace(case, variant=f"causal-{BASELINE}")
        # A new process has no memory of the case before.
        with contextlib.closing(Processes()) as processes:
            result = processes.call(case.contender, deadline, compare, case, baseline, _SECONDS)
        compared = result if isinstance(result, Compared) else None
        comparison.outcomes.append(Outcome(case, compared, "" if compared else str(result)))
        report(comparison)
    return comparison


def _nearest_length(length: int) -> int:
    return min(PAPER, key=lambda known: abs(math.log(known / length)))


def _paper_ratio(method: str, length: int, column: int) -> float | None:
    figures = PAPER[_nearest_length(length)]
    return figures[method][column] / figures[BASELINE][column] if method in figures else None


def table(comparison: Comparison) -> str:
    """Format the outcomes as text."""
    case = comparison.outcomes[0].case
    lines = [
        f"{comparison.device}, torch {comparison.torch}; causal models of size {case.size}, "
        f"{case.rows} x {case.length} tokens",
        "ratio: to a second model, with sinusoidal positions, that was updated by turns: median "
        "(quartiles)",
        f"paper: Press et al. 2022, table 1, at {_nearest_length(case.length)} tokens on one V100",
    ]
    use = ""
    for outcome in comparison.outcomes:
        if outcome.use != use:
            use = outcome.use
            columns = f"{'parameters':>13}{'tokens/s':>11}{'ratio':>7}{'paper':>20}"
            lines += ["", f"{use:26}{columns}{'peak memory':>14}{'ratio':>7}{'paper':>7}"]
        parameters = needs.parameters(outcome.case.architecture())
        name, compared = f"  {outcome.method:24}{parameters:>13,}", outcome.compared
        if compared is None:
            lines.append(f"{name}  {outcome.problem}")
            continue
        low, median, high = statistics.quantiles(compared.ratios, n=4, method="inclusive")
        lines.append(
            f"{name}{compared.tokens_per_second:>11,.0f}{median:>7.2f} ({low:.2f}, {high:.2f})"
            f"{_two_digits(outcome.paper_ratio)}{compared.peak_bytes / 1e9:>11.2f} GB"
            f"{_two_digits(comparison.memory_ratio(outcome))}"
            f"{_two_digits(outcome.paper_memory_ratio)}".rstrip()
        )
    return "\n".join(lines) + "\n"


def _two_digits(ratio: float | None) -> str:
    return " " * 7 if ratio is None else f"{ratio:>7.2f}"


def plot(comparison: Comparison, path: Path) -> None:
    """Plot the ratios of speed in training and in evaluation beside the paper's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    length = comparison.outcomes[0].case.length
    sides = {
        f"{comparison.device}, {length} tokens": -0.2,
        f"Press et al. 2022: V100, {_nearest_length(length)} tokens": 0.2,
    }
    for axes, contender in zip(panels, (PLAIN, FORWARD), strict=True):
        of_use = [o for o in comparison.outcomes if o.case.contender == contender]
        pairs = [(outcome.ratio() or 0.0, outcome.paper_ratio or 0.0) for outcome in of_use]
        for side, (label, shift) in enumerate(sides.items()):
            places = [place + shift for place in range(len(pairs))]
            bars = axes.bar(places, [pair[side] for pair in pairs], 0.4, label=label)
            texts = [f"{pair[side]:.2f}" if pair[side] else "" for pair in pairs]
            axes.bar_label(bars, texts, fontsize=8)
        axes.set_xticks(range(len(pairs)), [outcome.method for outcome in of_use])
        axes.set(title=USES[contender])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens/s over sinusoidal's")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
