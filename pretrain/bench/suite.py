"""`python -m pretrain bench --suite`: all figures of training speed in one command, within minutes.

Each contender has a process of its own. Cases come in the order of their importance; what the time
does not suffice for is named, as is what fails or needs more memory than there is. On a CPU the
models and lengths are small: the figures tell that everything runs, and what costs how much there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pretrain.bench import plan
from pretrain.bench.contenders import FLASH, ORIGINAL, OURS, PLAIN, TRANSFORMERS, Case
from pretrain.bench.worker import Measured, begin, matmul_peak, measure, say

LEFT_OUT = "left out: no time"
PARTS = ("attention", "matrices", "head", "optimizer", "data")
_MASKED = 0.15
_SECONDS = 2.0
"""That a case is trained for, beside its start; long enough to outlast what disturbs a machine."""
_Side = tuple[str, str, str]
"""Contender, variant and layout."""
_RATIOS: tuple[tuple[str, _Side, _Side], ...] = (
    *(
        (f"DeepSpeed / plain loop, {variant}", (OURS, variant, "full"), (PLAIN, variant, "full"))
        for variant in ("baseline", "zero-clap")
    ),
    (
        "ALiBi / learned positions, the same attention backend",
        (PLAIN, "alibi", "full"),
        (PLAIN, "baseline", "full"),
    ),
    (
        "ALiBi / learned positions, unmasked: the fastest SDPA",
        (PLAIN, "alibi", "full"),
        (PLAIN, "baseline", "unmasked"),
    ),
    (
        "FlexAttention's FLASH kernels / its usual ones, zero-clap",
        (FLASH, "zero-clap", "full"),
        (PLAIN, "zero-clap", "full"),
    ),
    (
        "plain loop / transformers, baseline",
        (PLAIN, "baseline", "full"),
        (TRANSFORMERS, "baseline", "full"),
    ),
    (
        "plain loop / the original's way, zero-clap, padded rows",
        (PLAIN, "zero-clap", "padded"),
        (ORIGINAL, "zero-clap", "padded"),
    ),
)
"""What is asked of the figures: tokens/s of one over those of another."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A case and how it went."""

    case: Case
    measured: Measured | None
    problem: str
    """Why there are no figures; empty where there are."""

    def line(self) -> str:
        """How it went, in a line."""
        return f"{self.case.name()}: {self.problem or f'{self.tokens_per_second():,.0f} tokens/s'}"

    def tokens_per_second(self) -> float:
        """Real tokens; 0 without figures."""
        return self.measured.tokens / self.measured.seconds if self.measured else 0.0

    def utilization(self, peak: float) -> float | None:
        """Share of the peak that is reached; counted for full rows alone."""
        if not self.measured or self.case.layout not in ("full", "unmasked"):
            return None
        case = self.case
        flops = plan.flops_per_token(case.architecture(), case.length, _MASKED)
        return flops * case.rows * case.length / self.measured.seconds / peak


@dataclasses.dataclass(frozen=True)
class Suite:
    """All outcomes."""

    device: str
    torch: str
    peak: float
    """Of a matrix product, measured in the same run; operations a second."""
    outcomes: list[Outcome]

    def ratios(self) -> dict[str, dict[str, float]]:
        """Tokens/s over tokens/s by size, at the first length, where both were measured."""
        found: dict[str, dict[str, float]] = {}
        speeds: dict[tuple[str, _Side], float] = {}
        for outcome in self.outcomes:
            case, speed = outcome.case, outcome.tokens_per_second()
            if speed and case.length == self.outcomes[0].case.length:
                side = case.contender, case.variant, case.layout
                speeds.setdefault((case.size, side), speed)  # the usual rows come first
        for name, above, below in _RATIOS:
            for size in dict.fromkeys(size for size, _ in speeds):
                if (size, above) in speeds and (size, below) in speeds:
                    ratio = speeds[size, above] / speeds[size, below]
                    found.setdefault(name, {})[size] = ratio
        return found

    def figures(self) -> dict[str, Any]:
        """Everything as plain values."""
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


def cases(on_gpu: bool) -> list[Case]:
    """What is measured, the most important first."""
    sizes = ("base", "large") if on_gpu else ("tiny", "small")
    middle, lengths = (2048, (512, 4096)) if on_gpu else (256, (128, 512))
    tokens = 32768 if on_gpu else 1024
    vocabulary = 50265 if on_gpu else 2000
    variants = ("baseline", "zero-clap")

    def case(contender: str, size: str, variant: str, length: int, layout: str) -> Case:
        rows = tokens // length // (2 if size == "large" else 1)
        parts = contender == PLAIN and length == middle and layout == "full"
        return Case(contender, size, variant, length, rows, layout, vocabulary, parts)

    found = [
        case(contender, size, variant, middle, "full")
        for contender in (PLAIN, OURS)
        for size, variant in itertools.product(sizes, variants)
    ]
    for variant, layout in (("alibi", "full"), ("baseline", "unmasked")):
        found += [case(PLAIN, size, variant, middle, layout) for size in sizes]
    found += [case(TRANSFORMERS, size, "baseline", middle, "full") for size in sizes]
    found += [case(ORIGINAL, size, "zero-clap", middle, "padded") for size in sizes]
    if on_gpu:
        found += [case(FLASH, size, "zero-clap", middle, "full") for size in sizes]
    for layout in ("packed", "padded"):
        found += [case(PLAIN, size, "zero-clap", middle, layout) for size in sizes]
    for length in lengths:
        found += [case(PLAIN, sizes[0], variant, length, "full") for variant in variants]
        found += [case(TRANSFORMERS, sizes[0], "baseline", length, "full")]
        found += [case(ORIGINAL, sizes[0], "zero-clap", length, "full")]
    found += [
        dataclasses.replace(case(PLAIN, sizes[0], variant, middle, "full"), rows=rows, parts=False)
        for variant in variants
        for rows in (1, 4 * tokens // middle)
    ]
    for length in lengths:
        found += [case(PLAIN, sizes[1], variant, length, "full") for variant in variants]
    return found


def run(
    todo: Iterable[Case] | None,
    minutes: float,
    tell: Callable[[Suite], object] = lambda suite: None,
) -> Suite:
    """Measure the cases (None: all that suit the device) within so many minutes.

    Args:
        todo: the most important first.
        minutes: what does not fit into them is left out.
        tell: is told what there is after each case.

    Raises:
        ValueError: there is no time at all.
    """
    if minutes <= 0:
        raise ValueError(f"--minutes {minutes}: accepted: above 0")
    import torch

    deadline = time.monotonic() + 60 * minutes
    on_gpu = torch.cuda.is_available()
    todo = cases(on_gpu) if todo is None else list(todo)
    say(f"{len(todo)} cases in at most {minutes:g} minutes; first a matrix product")
    with contextlib.closing(_Processes()) as processes:
        peak = processes.call(PLAIN, deadline, matmul_peak)
        if not isinstance(peak, float):
            raise ValueError(f"--minutes {minutes}: not enough for a single matrix product")
        device = torch.cuda.get_device_name() if on_gpu else "CPU: small models, in fp32"
        suite = Suite(device, torch.__version__, peak, [])
        for number, case in enumerate(todo, start=1):
            if (left := deadline - time.monotonic()) > 0:
                say(f"case {number} of {len(todo)}, {left / 60:.1f} minutes left: {case.name()}")
            result = processes.call(case.contender, deadline, measure, case, _SECONDS)
            suite.outcomes.append(_outcome(case, result))
            tell(suite)
    return suite


def _outcome(case: Case, result: object) -> Outcome:
    if isinstance(result, Measured):
        return Outcome(case, result, "")
    return Outcome(case, None, str(result))


class _Processes:
    """One for each contender, started when it is needed, ended when it takes too long."""

    def __init__(self) -> None:
        self._pools: dict[str, ProcessPoolExecutor] = {}

    def call(self, name: str, deadline: float, *call: Any) -> object:  # noqa: ANN401
        """What the call returns in the contender's process, or a word on why it does not."""
        left = deadline - time.monotonic()
        if left <= 0:
            return LEFT_OUT
        if name not in self._pools:
            self._pools[name] = ProcessPoolExecutor(1, get_context("spawn"), begin)
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
        """End all."""
        for name in list(self._pools):
            self._end(name)


def table(suite: Suite) -> str:
    """For people."""
    lines = [
        f"{suite.device}, torch {suite.torch}; a matrix product reaches "
        f"{suite.peak / 1e12:,.2f} TFLOP/s",
        f"{'':62} {'tokens/s':>10} {'MFU':>6} {'peak memory':>12} {'ms':>9}",
    ]
    for outcome in suite.outcomes:
        name = outcome.case.name()
        if not outcome.measured:
            lines.append(f"{name:62} {outcome.problem}")
            continue
        mfu = outcome.utilization(suite.peak)
        lines.append(
            f"{name:62} {outcome.tokens_per_second():>10,.0f} "
            f"{'' if mfu is None else f'{mfu:.1%}':>6} "
            f"{outcome.measured.peak_bytes / 1e9:>9.2f} GB {1e3 * outcome.measured.seconds:>9.1f}"
        )
    with_parts = [o for o in suite.outcomes if o.measured and o.measured.parts]
    if with_parts:
        heads = "".join(f"{part:>11}" for part in PARTS)
        lines += ["", f"{'parts, each by itself, in ms':62}{heads}"]
        for outcome in with_parts:
            assert outcome.measured
            parts = "".join(f"{1e3 * outcome.measured.parts[part]:>11.1f}" for part in PARTS)
            lines.append(f"{outcome.case.name():62}{parts}")
    if ratios := suite.ratios():
        sizes = list(dict.fromkeys(size for by_size in ratios.values() for size in by_size))
        lines += ["", f"{'tokens/s over tokens/s':62}{''.join(f'{s:>11}' for s in sizes)}"]
        for name, by_size in ratios.items():
            cells = "".join(f"{by_size[s]:>11.2f}" if s in by_size else " " * 11 for s in sizes)
            lines.append(f"{name:62}{cells}".rstrip())
    return "\n".join(lines) + "\n"


def plot(suite: Suite, path: Path) -> None:
    """Draw what a token costs against the length, and against the rows of a micro-batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [o for o in suite.outcomes if o.measured and o.case.layout in ("full", "unmasked")]
    size = done[0].case.size if done else ""
    done = [o for o in done if o.case.size == size]
    usual = {o.case.length: o.case.rows for o in reversed(done)}
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 4.2), layout="constrained", sharey=True)
    names = sorted({(o.case.contender, o.case.variant, o.case.layout) for o in done})
    for number, (axes, label) in enumerate(
        zip(panels, ("tokens of a row", "rows of a micro-batch"), strict=True)
    ):
        for index, name in enumerate(names):
            points = sorted(
                (o.case.rows if number else o.case.length, 1e6 / o.tokens_per_second())
                for o in done
                if (o.case.contender, o.case.variant, o.case.layout) == name
                and (number or o.case.rows == usual[o.case.length])
                and (not number or o.case.length == done[0].case.length)
            )
            axes.plot(
                *zip(*points, strict=True) if points else ((), ()),
                "o-",
                color=f"C{index}",
                label=", ".join(name[:2]) + (", no mask" if name[2] == "unmasked" else ""),
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel=label, ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="microseconds a token", title=f"{size}: against length")
    panels[1].set(title=f"{size}, rows of {done[0].case.length if done else 0}: against rows")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
