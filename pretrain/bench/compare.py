"""Training speed beside another library's, in the same run: what `python -m pretrain bench` does.

Every contender is a process of its own, so that its memory can be told apart. They take turns, an
update each, on the same batches; the ratio is the median over the turns, which a machine that is
busy with something else disturbs least.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

from pretrain.bench import worker as bench_worker
from pretrain.bench.contenders import EAGER, PLAIN, TRANSFORMERS, Case, collate

OURS = "zeroclap"
AGAINST = {"transformers": (TRANSFORMERS, EAGER)}
"""Contenders of each library that can be named: RoBERTa with each of its attentions on a CPU."""
_WARM_UP = 2  # turns that are not counted


@dataclasses.dataclass(frozen=True)
class Result:
    """How one contender did."""

    name: str
    tokens_per_second: float
    """Real input tokens, at the median update."""
    peak_bytes: int
    """Most memory: of the GPU, or of the whole process on a CPU."""
    advantage: float
    """Time of its update over the time of ours: above 1, we are faster."""


def compare(case: Case, against: str, steps: int) -> list[Result]:
    """Train every contender for `steps` updates after a warm-up; ours comes first.

    Args:
        case: of our plain loop; the others are given the same batches.
        against: a key of AGAINST.
        steps: updates that count.

    Raises:
        ValueError: steps is below 1, the library is not installed, or the model is not known.
    """
    case.architecture()
    if steps < 1:
        raise ValueError(f"steps {steps}: accepted: 1 or more")
    if find_spec(against) is None:
        raise ValueError(
            f"--against {against}: it is not installed; it comes with the test dependencies "
            "(pip install 'zeroclap[test]')"
        )
    contenders = (PLAIN, *AGAINST[against])
    with contextlib.ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(
                    1,
                    get_context("spawn"),
                    bench_worker.begin_one,
                    (dataclasses.replace(case, contender=contender),),
                )
            )
            for contender in contenders
        ]
        turns = [_turn(pools, step, steps) for step in range(_WARM_UP + steps)][_WARM_UP:]
        peaks = [pool.submit(bench_worker.peak_bytes).result() for pool in pools]
    tokens = [collate(case, _WARM_UP + step).tokens for step in range(steps)]
    return [
        Result(
            name=OURS if contender == PLAIN else contender,
            tokens_per_second=statistics.median(
                count / turn[place] for count, turn in zip(tokens, turns, strict=True)
            ),
            peak_bytes=peaks[place],
            advantage=statistics.median(turn[place] / turn[0] for turn in turns),
        )
        for place, contender in enumerate(contenders)
    ]


def _turn(pools: Sequence[ProcessPoolExecutor], step: int, steps: int) -> list[float]:
    """Seconds of one update of every contender."""
    number = step - _WARM_UP + 1
    what = f"measuring, update {number} of {steps}" if number > 0 else "warming up"
    bench_worker.say(f"{what}, {len(pools)} contenders in turn")
    return [pool.submit(bench_worker.timed_update, step).result() for pool in pools]


def table(case: Case, results: list[Result]) -> str:
    """What `compare` found, for people."""
    lines = [
        f"{case.variant} {case.size}, {case.rows} rows of at most {case.length} tokens, "
        f"{case.vocab_size:,} ids",
        f"{'':20} {'tokens/s':>10} {'peak memory':>12} {'ours is':>14}",
    ]
    for result in results:
        advantage = "" if result.name == OURS else f"{result.advantage:.2f} x as fast"
        lines.append(
            f"{result.name:20} {result.tokens_per_second:>10,.0f} "
            f"{result.peak_bytes / 1e9:>9.2f} GB {advantage:>14}"
        )
    return "\n".join(lines) + "\n"
