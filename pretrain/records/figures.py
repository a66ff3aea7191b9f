"""What a step's record shows beside the loss: figures for metrics.jsonl, curves for trackers.

Everything is computed on rank 0 from a finished record: nothing here waits for a device or for
other ranks. What ranks measure reaches it with the counts of the batch (`StepRecord.measured`).
"""

import math
import statistics
from collections.abc import Mapping

from pretrain.loop.protocols import StepRecord
from pretrain.records.metrics import finite_or_nan

SECONDS, MEMORY, PAIRS, BETA = "seconds", "memory_bytes", "pairs", "beta"
"""Names of what ranks measure (`StepRecord.measured`): the seconds that a rank worked by itself in
the step before (`pace.own_seconds`), the most bytes of memory that it has used, the pairs of
positions in the step's batch (`needs.computed_pairs`), and the beta of a CLAP head. NaN: not
measured."""
_LARGEST_EXPONENT = 700.0
BLOCKS = "blocks/"
"""Begins the names of figures that count the blocks of a corpus."""


def figures(record: StepRecord, positions: int, counted: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a step by name, those that are known; the guide explains them.

    Args:
        record: of the step.
        positions: places of the blocks that it read, padding included.
        counted: figures that follow from other records: `SpikeWatch.deviations`, with BLOCKS
            before its name the blocks of each of several corpora, and where the peak of the
            devices is known the shares of it that are used.
    """
    measured = record.measured
    found = {
        "perplexity": perplexity(record),
        "tokens_per_second": record.result.tokens / record.seconds,
        "padding": 1 - record.result.tokens / positions,
        **counted,
    }
    found["beta"] = measured.get(BETA, (math.nan,))[0]
    seconds = measured.get(SECONDS, ())
    if len(seconds) > 1 and not any(map(math.isnan, seconds)):
        slowest = max(seconds)
        found["slowest_rank"] = rank = seconds.index(slowest)
        found["slowest_rank_seconds"] = slowest
        found["other_ranks_seconds"] = statistics.median(seconds[:rank] + seconds[rank + 1 :])
    found["memory_bytes"] = max(measured.get(MEMORY, (math.nan,)))
    return {name: value for name, value in found.items() if not math.isnan(value)}


def perplexity(record: StepRecord) -> float:
    """Return exp of a step's loss; of several terms, of the first one, which is of tokens.

    NaN where that is not finite.
    """
    loss = record.result.loss
    if record.result.terms:
        loss = finite_or_nan(next(iter(record.result.terms.values())).loss)
    return math.exp(min(loss, _LARGEST_EXPONENT)) if math.isfinite(loss) else math.nan


_CURVES = {
    "perplexity": "train/perplexity",
    "beta": "model/beta",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "computed_mfu": "speed/computed_mfu",
    "padding": "data/padding",
    "memory_bytes": "memory/bytes",
    "slowest_rank": "ranks/slowest",
    "slowest_rank_seconds": "ranks/slowest_seconds",
    "other_ranks_seconds": "ranks/others_seconds",
    "loss_deviations": "spike/loss_deviations",
    "gradient_norm_deviations": "spike/gradient_norm_deviations",
}
"""Names of the figures' curves."""


def curves(record: StepRecord) -> dict[str, float]:
    """The curves of a step by name, as every tracker shows them."""
    result = record.result
    norm = result.gradient_norm
    return {
        "train/loss": result.loss,
        **{f"train/loss/{n}": finite_or_nan(t.loss) for n, t in result.terms.items()},
        "optimizer/gradient_norm": math.nan if norm is None else norm,
        "optimizer/loss_scale": result.loss_scale,
        "optimizer/learning_rate": record.learning_rate,
        "speed/step_seconds": record.seconds,
        "speed/data_seconds": record.data_seconds,
        "data/epoch": record.epoch,
        **{_CURVES[n]: value for n, value in record.figures.items() if n in _CURVES},
        **{f"data/{n}": value for n, value in record.figures.items() if n.startswith(BLOCKS)},
    }
