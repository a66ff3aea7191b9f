"""Whether the first losses of a resumed attempt continue the run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pretrain.config.run import RunConfig
from pretrain.loop.protocols import StepRecord
from pretrain.records import ledger, metrics
from pretrain.train.resume import Start

FIRST_LOSSES = 4
"""Number of steps after a resume whose losses are compared."""
_SAME_FIRST_LOSS, _SAME_LATER_LOSS = 1e-5, 1e-3
"""Relative tolerances. The first loss after a resume is computed from the very weights that were
saved; the next ones follow updates, which on a GPU may differ in their last bits."""
_HISTORY = 32
_MAD_TO_DEVIATION = 1.4826
_SMALLEST_DEVIATION = 0.01
"""Nats."""


def recorded_losses(
    lines: Sequence[Mapping[str, Any]], first_step: int, seed: int, attempts: Collection[int]
) -> list[float]:
    """Return the losses that the first steps of a resumed attempt should repeat.

    Args:
        lines: of metrics.jsonl.
        first_step: of the attempt.
        seed: in force. No seed is used twice, so an equal seed means an equal history.
        attempts: those with this attempt's micro-batch size, which keys the dropout.

    Returns:
        The losses of at most FIRST_LOSSES steps from `first_step` on; none if that step was not
        done before.
    """
    found = {
        line["step"]: metrics.loss_of(line)
        for line in lines
        if line["seed"] == seed and line["attempt"] in attempts
    }
    steps = range(first_step, first_step + FIRST_LOSSES)
    end = next((step for step in steps if step not in found), steps.stop)
    return [found[step] for step in range(first_step, end)]


def discontinuity(
    losses: Sequence[float],
    recorded: Sequence[float],
    history: Sequence[float],
    deviations: float,
) -> str:
    """Say why the first losses after a resume do not continue the run; "" if they do.

    Args:
        losses: of the steps done since, in nats.
        recorded: the losses that these steps should repeat (`recorded_losses`).
        history: of the steps before, oldest first. Where nothing is recorded, the median of the
            first losses should lie among them.
        deviations: accepted distance from the history's median, in robust standard deviations.
    """
    for number, (now, then) in enumerate(zip(losses, recorded, strict=False)):
        tolerance = _SAME_LATER_LOSS if number else _SAME_FIRST_LOSS
        if math.isnan(then):  # it was not finite and may be so again
            continue
        if not abs(now - then) <= tolerance * abs(then):  # true for NaN as well
            return f"loss {now:.6f} where the same step, done before, had {then:.6f}"
    history = [loss for loss in history if math.isfinite(loss)][-_HISTORY:]
    if recorded or len(losses) < FIRST_LOSSES or len(history) < _HISTORY:
        return ""
    level, center = statistics.median(losses), statistics.median(history)
    spread = _MAD_TO_DEVIATION * statistics.median(abs(loss - center) for loss in history)
    limit = deviations * max(spread, _SMALLEST_DEVIATION)
    if abs(level - center) <= limit:
        return ""
    return f"median loss {level:.4f}, outside {center:.4f} +- {limit:.4f} of the steps before"


def continuity_check(
    config: RunConfig,
    start: Start,
    records: Sequence[ledger.Record],
    lines: Sequence[dict[str, Any]],
    changes: Sequence[int],
    report: Callable[[int, str], None],
) -> Callable[[StepRecord], None]:
    """Return an observer of an attempt's first steps that calls `report` at a discontinuity.

    Args:
        config: the recipe.
        start: how the attempt begins.
        records: of the ledger.
        lines: of metrics.jsonl, from before the attempt.
        changes: steps from which on another level of the loss is expected. No loss is compared with
            the history before such a step.
        report: called at most once, with a step and the reason.
    """
    size = config.phase(start.step).config.batch.micro_batch_size
    attempts = {
        record["attempt"]
        for record in records
        if record["kind"] == "attempt" and record["micro_batch_size"] == size
    }
    recorded = recorded_losses(lines, start.step, start.seed, attempts)
    begun = max((step for step in changes if step < start.step + FIRST_LOSSES), default=0)
    history = [
        metrics.loss_of(line)
        for line in metrics.surviving(lines)
        if begun <= line["step"] < start.step
    ]
    losses: list[float] = []
    reason = ""

    def observe(record: StepRecord) -> None:
        nonlocal reason
        if reason or len(losses) == FIRST_LOSSES:
            return
        losses.append(record.result.loss)
        reason = discontinuity(losses, recorded, history, config.spike.deviations)
        if reason:
            report(record.step, reason)

    return observe
