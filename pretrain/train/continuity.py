"""Whether the first loss of a resumed attempt repeats the one that was recorded.

It is computed from the very weights that were saved. Where an earlier attempt did the same step,
with the same seed and the same micro-batches, it had the same loss but for the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pretrain.loop.protocols import StepRecord
from pretrain.records import ledger, metrics
from pretrain.train.resume import Start

_TOLERANCE = 1e-5
"""Relative."""


def recorded_loss(
    lines: Sequence[Mapping[str, Any]],
    records: Sequence[ledger.Record],
    start: Start,
    micro_batch_size: int,
) -> float:
    """Return the loss that the attempt's first step had before; NaN if it had none that is finite.

    No seed is used twice, so an equal seed means an equal history.

    Args:
        lines: of metrics.jsonl, from before the attempt.
        records: of the ledger.
        start: how the attempt begins.
        micro_batch_size: of its first step, which keys the dropout.
    """
    attempts = {
        record["attempt"]
        for record in records
        if record["kind"] == "attempt" and record["micro_batch_size"] == micro_batch_size
    }
    found = [
        metrics.loss_of(line)
        for line in lines
        if (line["step"], line["seed"]) == (start.step, start.seed) and line["attempt"] in attempts
    ]
    return found[-1] if found else math.nan


def continuity_check(
    first_step: int, recorded: float, report: Callable[[int, str], None]
) -> Callable[[StepRecord], None]:
    """Return an observer that calls `report` if the attempt's first loss is not `recorded`.

    Args:
        first_step: of the attempt.
        recorded: the result of `recorded_loss`.
        report: called with the step and the reason.
    """

    def observe(record: StepRecord) -> None:
        loss = record.result.loss
        is_compared = record.step == first_step and not math.isnan(recorded)
        # Not `>`, which would be false for NaN.
        if is_compared and not abs(loss - recorded) <= _TOLERANCE * abs(recorded):
            had = f"{recorded:.6f}"
            report(record.step, f"loss {loss:.6f} where the same step, done before, had {had}")

    return observe
