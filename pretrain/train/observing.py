"""What rank 0 shows and judges of each step of an attempt."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from data_prep.common.wording import count
from pretrain.checks import needs
from pretrain.data.batches import validation_note
from pretrain.loop.protocols import StepRecord
from pretrain.records import ledger, metrics, pace
from pretrain.records.figures import BLOCKS, figures
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import SpikeWatch, declared_changes, history_before
from pretrain.train.log import RunLog
from pretrain.train.prepared import Prepared
from pretrain.train.resume import Start

Observer = Callable[[StepRecord], None]
_TOLERANCE = 1e-5
"""Relative. A step that is done again has the same loss but for the last bits."""


def open_records(prepared: Prepared, log: RunLog) -> tuple[SpikeWatch, list[Observer]]:
    """Open the run's records on rank 0, and bring the detector to the attempt's first step.

    Returns:
        The watch of the loop, and its observers. On other ranks nobody asks them.

    Raises:
        Failure: on every rank, if rank 0 cannot.
    """
    opened: list[tuple[SpikeWatch, list[Observer]]] = []
    prepared.group.on_rank_0(lambda: opened.append(_open(prepared, log)))
    unasked = SpikeWatch(SpikeDetector(prepared.config.spike), [], lambda event: None)
    return opened[0] if opened else (unasked, [])


def _open(prepared: Prepared, log: RunLog) -> tuple[SpikeWatch, list[Observer]]:
    config, start, run = prepared.config, prepared.start, prepared.run_folder
    for line in _announcement(prepared):
        log.say(line)
    lines, validation = (
        metrics.read_metrics(run / name, lambda text: log.say(f"WARNING: {text}"))
        for name in (metrics.METRICS, metrics.VALIDATION)
    )
    observers = log.open(validation)
    changes = declared_changes(prepared.segments, start.state)
    watch = SpikeWatch(
        SpikeDetector(config.spike, changes),
        history_before(start.step, lines, validation),
        lambda event: log.suspicion(**dataclasses.asdict(event)),
    )
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    micro_batch_size = prepared.segments.at(start.step).config.batch.micro_batch_size
    recorded = recorded_loss(lines, records, start, micro_batch_size)
    continuity = continuity_check(start.step, recorded, log.discontinuity)
    observers += [continuity, _slow_rank_warning(prepared, log)]
    figures_of = _figures(prepared, watch)

    def observe(record: StepRecord) -> None:
        record = dataclasses.replace(record, figures=figures_of(record))
        for observer in observers:
            observer(record)

    return watch, [observe]


def _announcement(prepared: Prepared) -> Iterator[str]:
    """Lines that say what the attempt is, each short enough for a screen; the ledger says more."""
    config, start, computing = prepared.config, prepared.start, prepared.computing
    table, now = prepared.model.encoder.embeddings.tokens, prepared.segments.at(start.step).config
    padding = (table.num_embeddings - table.vocab_size) * table.embedding_dim
    yield (
        f"attempt {start.attempt}: {config.model.variant} {config.model.size}, "
        f"{prepared.parameters - padding:,} parameters, {start.share_of_tokens:.1%} of the corpus, "
        f"steps {start.step} to {config.training.steps}, "
        f"{count(prepared.group.world_size, 'rank')} ({prepared.process.device}, "
        f"{config.training.deepspeed}, {computing.backend})"
    )
    shares = start.order.mixture.shares(prepared.segments.sizes.first_block(start.step))
    for corpus, share in zip(start.corpora, shares, strict=True):
        if corpus["name"]:
            yield f"{corpus['name']}: {share:.1%} of the blocks, of {corpus['blocks']:,}"
    yield validation_note(now.objective)


def _figures(prepared: Prepared, watch: SpikeWatch) -> Callable[[StepRecord], dict[str, float]]:
    """What computes the figures that are shown beside each step's loss."""
    segments, start = prepared.segments, prepared.start
    flops = {
        part.first_step: needs.flops_per_token(
            prepared.architecture,
            part.config.data.sequence_length,
            part.config.objective.target_share,
        )
        for part in segments.parts
    }

    def blocks(step: int) -> dict[str, int]:
        places = map(segments.sizes.first_block, (step, step + 1))
        counts = zip(*map(start.order.mixture.counts, places), strict=True)
        names = [corpus["name"] for corpus in start.corpora]
        of_names = zip(names, counts, strict=True)
        return {f"{BLOCKS}{name}": end - first for name, (first, end) in of_names if name}

    def of_step(record: StepRecord) -> dict[str, float]:
        step = record.step
        segment = segments.at(step)
        positions = segments.sizes.size(step) * segment.config.data.sequence_length
        return figures(
            record,
            positions,
            {**watch.deviations(record), **blocks(step)},
            flops[segment.first_step] * positions,
            prepared.computing.peak_flops,
        )

    return of_step


def _slow_rank_warning(prepared: Prepared, log: RunLog) -> Observer:
    """What warns of a rank that the others wait for, once in an attempt."""
    recent: deque[Mapping[str, float]] = deque(maxlen=pace.STEPS)

    def observe(record: StepRecord) -> None:
        recent.append(record.figures)
        if record.step % pace.STEPS == 0 and (slow := pace.slow_rank(recent, prepared.hosts)):
            text = "is slow and every step waits for it; `status` says how slow"
            log.warn_once(f"WARNING: {slow.who} {text}")

    return observe


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
