"""The spike detector of a running attempt, and its input.

The detector keeps no state on disk. An attempt first feeds it the surviving steps, so that a
restart changes no decision.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_prep.common.exit_codes import EXIT_SPIKE
from pretrain.config.run import Segment, Segments
from pretrain.loop.protocols import GO_ON, StepRecord
from pretrain.records import metrics
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.observations import Evaluation, Event, Observation, Seen, in_order


def declared_changes(segments: Segments) -> list[int]:
    """Steps from which on the loss may be higher without a spike.

    Other data, another objective or another learning rate schedule begins there, or the batch
    becomes smaller. A larger batch lowers the loss. Where a halved rate returned, the loss of small
    models rose by at most 0.12 nats, or 0.6 standard deviations, which nothing suspects.
    """

    def raising(part: Segment) -> object:
        now, schedule = part.config, (part.schedule_start, part.schedule_steps)
        return now.data, now.objective, now.optimizer, now.schedule, schedule

    return [
        now.first_step
        for before, now in itertools.pairwise(segments.parts)
        if raising(before) != raising(now)
        or now.config.batch.global_batch_size < before.config.batch.global_batch_size
    ]


def observation(line: Mapping[str, Any]) -> Observation:
    """The detector's input for one step, from its line of metrics.jsonl."""
    return Observation(
        step=line["step"],
        loss=metrics.loss_of(line),
        gradient_norm=metrics.finite_or_nan(line["gradient_norm"]),
        loss_scale=line["loss_scale"],
        skipped=line["skipped"],
        scale_exhausted=line.get("scale_exhausted", False),
    )


class SpikeWatch:
    """Watch of the training loop: feeds the detector and stops the loop at a spike."""

    def __init__(
        self, detector: SpikeDetector, history: Sequence[Seen], on_event: Callable[[Event], None]
    ) -> None:
        """Feed the surviving steps and evaluations to the detector.

        Args:
            detector: a new one.
            history: as returned by `history_before`.
            on_event: called with each event of the steps and evaluations to come.
        """
        self._detector, self._on_event = detector, on_event
        evaluations = (seen for seen in history if isinstance(seen, Evaluation))
        self._evaluated = {(seen.updates, seen.validation_id) for seen in evaluations}
        for seen in history:
            detector.update(seen)

    def deviations(self, record: StepRecord) -> dict[str, float]:
        """What the detector sees in a step that it is yet to judge."""
        return self._detector.deviations(observation(metrics.line_of(record)))

    def has_evaluated(self, updates: int, validation_id: str) -> bool:
        """Whether the history has such an evaluation after so many updates."""
        return (updates, validation_id) in self._evaluated

    def __call__(self, record: StepRecord) -> int:
        """Judge a finished step; returns EXIT_SPIKE if a spike is confirmed, else GO_ON."""
        return self._judge(observation(metrics.line_of(record)))

    def evaluated(self, updates: int, loss: float, validation_id: str) -> int:
        """Judge an evaluation after so many updates; returns as the call."""
        return self._judge(Evaluation(updates, metrics.finite_or_nan(loss), validation_id))

    def _judge(self, seen: Seen) -> int:
        events = self._detector.update(seen)
        for event in events:
            self._on_event(event)
        return EXIT_SPIKE if any(event.kind == "spike" for event in events) else GO_ON


def history_before(
    step: int, lines: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]
) -> list[Seen]:
    """The detector's input before an attempt: the surviving steps and evaluations.

    Args:
        step: first step of the attempt. An evaluation after so many updates was judged before it.
        lines: every line of metrics.jsonl.
        validation: every line of validation.jsonl.
    """
    before = [line for line in metrics.surviving(lines) if line["step"] < step]
    counted = metrics.surviving_validation(validation, before)
    evaluations = (
        Evaluation(line["step"], metrics.loss_of(line), line.get("validation_id", ""))
        for line in counted
        if line["step"] <= step
    )
    return in_order(map(observation, before), evaluations)
