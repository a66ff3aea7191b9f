"""The spike detector of a running attempt, and its input.

The detector keeps no state on disk. An attempt first feeds it the surviving steps, so that a
restart changes no decision. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pretrain.config.run import RunConfig
from pretrain.exit_codes import EXIT_SPIKE
from pretrain.loop import GO_ON, StepRecord
from pretrain.run import metrics
from pretrain.run.ledger import RunState
from pretrain.spikes.detector import Event, Observation, SpikeDetector


def declared_changes(config: RunConfig, state: RunState) -> list[int]:
    """Steps at which another level or scatter of the loss is expected.

    A phase begins there, the batch grows, the weights of corpora change, or a lowered learning rate
    returns to its schedule.
    """
    begun = (phase.first_step for phase in config.resolved_phases[1:])
    weights = (step for step, _ in config.weights()[1:])
    returned = (end for _, end, _ in state.lowered)
    return sorted({*begun, *config.sizes.changes(), *weights, *returned})


def changed_measures(config: RunConfig) -> list[int]:
    """Steps from which on validation measures something else: other blocks, or another loss."""

    def measure(config: RunConfig) -> list[object]:
        data, loss = config.data, config.objective.for_validation()
        paths = [corpus.path for corpus in data.named_corpora.values()]
        blocks = config.training.evaluation_blocks
        return [paths, data.sequence_length, data.packing, blocks, loss]

    return [
        phase.first_step
        for before, phase in itertools.pairwise(config.resolved_phases)
        if measure(before.config) != measure(phase.config)
    ]


def observations(
    lines: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]
) -> list[Observation]:
    """The detector's input for the surviving steps.

    A validation loss that was measured after `s` updates belongs to step `s`.

    Args:
        lines: the lines of metrics.jsonl of the surviving steps.
        validation: the same of validation.jsonl.
    """
    measured = {line["step"]: metrics.loss_of(line) for line in validation}
    return [_observation(line, measured.get(line["step"])) for line in lines]


def _observation(line: Mapping[str, Any], validation_loss: float | None) -> Observation:
    """The detector's input for one step, from its line of metrics.jsonl."""
    return Observation(
        step=line["step"],
        loss=metrics.loss_of(line),
        gradient_norm=metrics.finite_or_nan(line["gradient_norm"]),
        loss_scale=line["loss_scale"],
        skipped=line["skipped"],
        scale_exhausted=line.get("scale_exhausted", False),  # earlier versions did not write it
        validation_loss=validation_loss,
    )


class SpikeWatch:
    """Watch of the training loop: feeds the detector and stops the loop at a spike."""

    def __init__(
        self,
        detector: SpikeDetector,
        history: Sequence[Observation],
        validation_loss: float | None,
        on_event: Callable[[Event], None],
    ) -> None:
        """Feed the surviving steps to the detector.

        Args:
            detector: a new one.
            history: observations of the surviving steps.
            validation_loss: measured since the last of them; None if there was no evaluation.
            on_event: called with each event of the steps to come.
        """
        self._detector, self._on_event = detector, on_event
        for observation in history:
            detector.update(observation)
        self.validation_loss = validation_loss
        """Measured since the last step."""

    def deviations(self, record: StepRecord) -> dict[str, float]:
        """What the detector sees in a step that it is yet to judge (`SpikeDetector.deviations`)."""
        loss, norm = self._detector.deviations(_observation(vars(record), None))
        return {"loss_deviations": loss, "gradient_norm_deviations": norm}

    def __call__(self, record: StepRecord) -> int:
        """Judge a finished step; returns EXIT_SPIKE if a spike is confirmed, else GO_ON."""
        pending, self.validation_loss = self.validation_loss, None
        validation_loss = None if pending is None else metrics.finite_or_nan(pending)
        events = self._detector.update(_observation(vars(record), validation_loss))
        for event in events:
            self._on_event(event)
        return EXIT_SPIKE if any(event.kind == "spike" for event in events) else GO_ON


def history_before(
    step: int, lines: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]
) -> tuple[list[Observation], float | None]:
    """The detector's input before an attempt.

    Args:
        step: first step of the attempt.
        lines: every line of metrics.jsonl.
        validation: every line of validation.jsonl.

    Returns:
        Observations of the surviving steps, and the validation loss measured since the last one.
    """
    before = [line for line in metrics.surviving(lines) if line["step"] < step]
    counted = metrics.surviving_validation(validation, before)
    measured = [line for line in counted if line["step"] <= step]
    pending = metrics.loss_of(measured[-1]) if measured and measured[-1]["step"] == step else None
    return observations(before, measured), pending
