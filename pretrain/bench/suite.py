"""The benchmark of training speed behind `python -m pretrain bench`.

Each contender runs in a process of its own. Cases are listed in order of importance; what does not
fit into the time, fails or runs out of memory is reported as such. On a CPU the models are small:
the figures show that everything runs, and what it costs there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from data_prep import children
from pretrain.bench import needs
from pretrain.bench.contenders import EAGER, FAIRSEQ, FLASH, OURS, PLAIN, TRANSFORMERS, Case
from pretrain.bench.worker import Measured, log, matmul_peak, measure, prepare_process

LEFT_OUT = "left out: no time"
PARTS = ("attention", "matrices", "head", "optimizer", "data")
_MASKED = 0.15
_SECONDS = 2.0
"""Training time of a case after its start: long enough to average out other work on the machine."""
_Side = tuple[str, str, str]
"""Contender, variant and layout."""
_BASELINE, _ALIBI, _ZERO_CLAP = (
    (PLAIN, variant, "full") for variant in ("baseline", "alibi", "zero-clap")
)
_RATIOS: dict[str, tuple[_Side, _Side]] = {
    "DeepSpeed / plain loop, baseline": ((OURS, "baseline", "full"), _BASELINE),
    "DeepSpeed / plain loop, zero-clap": ((OURS, "zero-clap", "full"), _ZERO_CLAP),
    "ALiBi / learned positions, the same attention backend": (_ALIBI, _BASELINE),
    "ALiBi / learned positions, unmasked: the fastest SDPA": (
        _ALIBI,
        (PLAIN, "baseline", "unmasked"),
    ),
    "FlexAttention's FLASH kernels / its usual ones, zero-clap": (
        (FLASH, "zero-clap", "full"),
        _ZERO_CLAP,
    ),
    "plain loop / transformers, baseline": (_BASELINE, (TRANSFORMERS, "baseline", "full")),
    "plain loop / transformers, eager, baseline": (_BASELINE, (EAGER, "baseline", "full")),
    "plain loop / EIFY/fairseq's attention, zero-clap, padded": (
        (PLAIN, "zero-clap", "padded"),
        (FAIRSEQ, "zero-clap", "padded"),
    ),
}
"""Reported ratios of tokens/s: numerator and denominator."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A case with its figures, or with the reason why there are none."""

    case: Case
    measured: Measured | None
    problem: str
    """Empty if the case was measured."""

    def tokens_per_second(self) -> float:
        """Return tokens per second without padding; 0 if the case was not measured."""
        return self.measured.tokens / self.measured.seconds if self.measured else 0.0

    def utilization(self, peak: float) -> float | None:
        """Return the share of `peak` (FLOP/s) that was reached; None unless rows were full."""
        if not self.measured or self.case.layout not in ("full", "unmasked"):
            return None
        case = self.case
        flops = needs.flops_per_token(case.architecture(), case.length, _MASKED)
        return flops * case.rows * case.length / self.measured.seconds / peak


@dataclasses.dataclass(frozen=True)
class Suite:
    """All outcomes on one device."""

    device: str
    torch: str
    peak: float
    """FLOP/s of a matrix product, measured in the same run."""
    outcomes: list[Outcome]

    def ratios(self) -> dict[str, dict[str, float]]:
        """Return `_RATIOS` by name and model size, where both sides were measured.

        Only cases of the first case's length count.
        """
        speeds: dict[tuple[str, _Side], float] = {}
        for outcome in self.outcomes:
            case, speed = outcome.case, outcome.tokens_per_second()
            if speed and case.length == self.outcomes[0].case.length:
                side = case.contender, case.variant, case.layout
                # The default number of rows comes first in `cases`.
                speeds.setdefault((case.size, side), speed)
        sizes = dict.fromkeys(size for size, _ in speeds)
        found = {
            name: {
                size: speeds[size, above] / speeds[size, below]
                for size in sizes
                if (size, above) in speeds and (size, below) in speeds
            }
            for name, (above, below) in _RATIOS.items()
        }
        return {name: by_size for name, by_size in found.items() if by_size}

    def figures(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "device": self.device,
            "torch": self.torch,
            "matmul_flops": self.peak,
            "ratios": self.ratios(),
            "cases": [
                {
                    **dataclasses.asdict(outcome.case),
                    **(dataclasses.asdict(outcome.measured) if outcome.measured else {}),
                    "tokens_per_second": outcome.tokens_per_second() or None,
                    "mfu": outcome.utilization(self.peak),
                    "problem": outcome.problem,
                }
                for outcome in self.outcomes
            ],
        }


def cases(on_gpu: bool, size: str | None = None, length: int | None = None) -> list[Case]:
    """List the cases, most important first.

    Args:
        on_gpu: choose models and lengths for a GPU rather than for a CPU.
        size: measure this model size only.
        length: measure this sequence length only, in tokens.

    Raises:
        ValueError: an unknown size, or a length without room for text.
    """
    sizes = [size] if size else ["base", "large"] if on_gpu else ["tiny", "small"]
    default = 2048 if on_gpu else 256
    lengths = [default, *((512, 4096) if on_gpu else (128, 512))]
    if length is not None:
        lengths = [length]
    usual, others = lengths[0], lengths[1:]
    tokens, vocab_size = (32768, 50265) if on_gpu else (1024, 2000)
    variants = ("baseline", "zero-clap")

    def case(contender: str, size: str, variant: str, length: int, layout: str) -> Case:
        rows = max(1, tokens // max(1, length) // (2 if size == "large" else 1))
        parts = contender == PLAIN and length == usual and layout == "full"
        return Case(contender, size, variant, length, rows, layout, vocab_size, parts)

    found = [
        case(contender, size, variant, usual, "full")
        for contender in (PLAIN, OURS)
        for size, variant in itertools.product(sizes, variants)
    ]
    found[0].architecture()  # refuses an unknown size
    for contender, variant, layout in (
        (PLAIN, "alibi", "full"),
        (PLAIN, "baseline", "unmasked"),
        (TRANSFORMERS, "baseline", "full"),
        (FAIRSEQ, "zero-clap", "padded"),
        (FLASH, "zero-clap", "full") if on_gpu else (EAGER, "baseline", "full"),
        (PLAIN, "zero-clap", "packed"),
        (PLAIN, "zero-clap", "padded"),
    ):
        found += [case(contender, size, variant, usual, layout) for size in sizes]
    for other in others:
        found += [case(PLAIN, sizes[0], variant, other, "full") for variant in variants]
        found += [case(TRANSFORMERS, sizes[0], "baseline", other, "full")]
        found += [case(FAIRSEQ, sizes[0], "zero-clap", other, "full")]
    found += [
        dataclasses.replace(case(PLAIN, sizes[0], variant, usual, "full"), rows=rows, parts=False)
        for variant in variants
        for rows in (1, max(2, 4 * tokens // usual))
    ]
    for larger, other in itertools.product(sizes[1:], others):
        found += [case(PLAIN, larger, variant, other, "full") for variant in variants]
    return found


def run(
    todo: Sequence[Case], minutes: float, report: Callable[[Suite], object] = lambda suite: None
) -> Suite:
    """Measure the cases within a time limit.

    Args:
        todo: the cases, most important first.
        minutes: the limit; cases that do not fit are left out.
        report: called after each case with the outcomes so far.

    Raises:
        ValueError: the limit leaves no time at all.
    """
    deadline = deadline_after(minutes)
    log(f"{len(todo)} cases in at most {minutes:g} minutes; first a matrix product")
    with contextlib.closing(Processes()) as processes:
        peak = processes.call(PLAIN, deadline, matmul_peak)
        if not isinstance(peak, float):
            raise ValueError(f"--minutes {minutes}: not enough for a single matrix product")
        suite = Suite(device_name(), torch.__version__, peak, [])
        for number, case in enumerate(todo, start=1):
            if (left := deadline - time.monotonic()) > 0:
                log(f"case {number} of {len(todo)}, {left / 60:.1f} minutes left: {case.name()}")
            result = processes.call(case.contender, deadline, measure, case, _SECONDS)
            measured = result if isinstance(result, Measured) else None
            suite.outcomes.append(Outcome(case, measured, "" if measured else str(result)))
            report(suite)
    return suite


def deadline_after(minutes: float) -> float:
    """Return the end of a time limit, on the monotonic clock.

    Raises:
        ValueError: the limit leaves no time at all.
    """
    if minutes <= 0:
        raise ValueError(f"--minutes {minutes}: accepted: above 0")
    return time.monotonic() + 60 * minutes


def device_name() -> str:
    """Return the name of the GPU that is measured; there may be none."""
    on_gpu = torch.cuda.is_available()
    return torch.cuda.get_device_name() if on_gpu else "CPU: small models, in fp32"


class Processes:
    """One worker process per contender, started on demand and killed if it takes too long."""

    def __init__(self) -> None:
        """Start none yet."""
        self._pools: dict[str, ProcessPoolExecutor] = {}

    def call(self, name: str, deadline: float, *call: Any) -> object:  # noqa: ANN401
        """Run a call in a contender's process; returns its value or a message why there is none."""
        left = deadline - time.monotonic()
        if left <= 0:
            return LEFT_OUT
        if name not in self._pools:
            self._pools[name] = ProcessPoolExecutor(1, children.spawn_context(), prepare_process)
        try:
            return self._pools[name].submit(*call).result(timeout=left)
        except TimeoutError:
            self._end(name)
            return LEFT_OUT
        except BrokenProcessPool:
            self._end(name)
            return "its process died: out of memory, most often"

    def _end(self, name: str) -> None:
        pool = self._pools.pop(name)
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Kill all processes."""
        for name in list(self._pools):
            self._end(name)


def table(suite: Suite) -> str:
    """Format the outcomes as text."""
    lines = [
        f"{suite.device}, torch {suite.torch}; a matrix product reaches "
        f"{suite.peak / 1e12:,.2f} TFLOP/s",
        f"{'':62} {'tokens/s':>10} {'MFU':>6} {'peak memory':>12} {'ms':>9}",
    ]
    parts = ["", f"{'parts, each by itself, in ms':62}" + "".join(f"{part:>11}" for part in PARTS)]
    for outcome in suite.outcomes:
        name, measured = outcome.case.name(), outcome.measured
        if not measured:
            lines.append(f"{name:62} {outcome.problem}")
            continue
        mfu = outcome.utilization(suite.peak)
        lines.append(
            f"{name:62} {outcome.tokens_per_second():>10,.0f} "
            f"{'' if mfu is None else f'{mfu:.1%}':>6} "
            f"{measured.peak_bytes / 1e9:>9.2f} GB {1e3 * measured.seconds:>9.1f}"
        )
        if measured.parts:
            cells = "".join(f"{1e3 * measured.parts[part]:>11.1f}" for part in PARTS)
            parts.append(f"{name:62}{cells}")
    if len(parts) > 2:
        lines += parts
    if ratios := suite.ratios():
        sizes = list(dict.fromkeys(size for by_size in ratios.values() for size in by_size))
        lines += ["", f"{'tokens/s over tokens/s':62}{''.join(f'{s:>11}' for s in sizes)}"]
        for name, by_size in ratios.items():
            cells = "".join(f"{by_size[s]:>11.2f}" if s in by_size else " " * 11 for s in sizes)
            lines.append(f"{name:62}{cells}".rstrip())
    return "\n".join(lines) + "\n"


def plot(suite: Suite, path: Path) -> None:
    """Plot the time per token against the sequence length and against the rows per micro-batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [o for o in suite.outcomes if o.measured and o.case.layout in ("full", "unmasked")]
    size, length = (done[0].case.size, done[0].case.length) if done else ("", 0)
    done = [o for o in done if o.case.size == size]
    rows = {o.case.length: o.case.rows for o in reversed(done)}  # the default comes first
    curves: dict[tuple[str, str, str], list[tuple[Case, float]]] = {}
    for o in done:
        curve = curves.setdefault((o.case.contender, o.case.variant, o.case.layout), [])
        curve.append((o.case, 1e6 / o.tokens_per_second()))
    figure, (by_length, by_rows) = pyplot.subplots(
        1, 2, figsize=(13, 4.2), layout="constrained", sharey=True
    )
    for (contender, variant, layout), costs in sorted(curves.items()):
        label = f"{contender}, {variant}" + (", no mask" if layout == "unmasked" else "")
        against_length = {c.length: cost for c, cost in costs if c.rows == rows[c.length]}
        against_rows = {c.rows: cost for c, cost in costs if c.length == length}
        for axes, points in ((by_length, against_length), (by_rows, against_rows)):
            places = sorted(points)
            axes.plot(places, [points[place] for place in places], "o-", label=label)
    for axes, label in ((by_length, "tokens per row"), (by_rows, "rows per micro-batch")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel=label, ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    by_length.set(ylabel="microseconds per token", title=f"{size}: against length")
    by_rows.set(title=f"{size}, rows of {length}: against rows")
    figure.legend(*by_length.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
