"""The detector beside a running attempt: what it is fed, live and after a restart.

A detector has no state on disk. An attempt begins with the detector that the surviving steps lead
to, so that a restart changes no decision. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pretrain.config.run import RunConfig
from pretrain.exit_codes import EXIT_SPIKE
from pretrain.loop import GO_ON, StepRecord
from pretrain.run import metrics
from pretrain.run.ledger import RunState
from pretrain.spikes.detector import Event, Observation, SpikeDetector


def declared_changes(config: RunConfig, state: RunState) -> list[int]:
    """Steps from which on another level of the loss, or of its scatter, is no surprise.

    The batch grows, or a lowered learning rate jumps back. The schedule itself has no jumps.
    """
    return sorted({*config.batch.changes(), *(end for _, end, _ in state.lowered)})


def observations(
    lines: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]
) -> list[Observation]:
    """What the detector saw of the surviving steps.

    A validation loss after `s` updates is seen with step `s`.

    Args:
        lines: of metrics.jsonl, of the surviving steps.
        validation: of validation.jsonl, likewise.
    """
    measured = {line["step"]: metrics.loss_of(line) for line in validation}
    return [_observation(line, measured.get(line["step"])) for line in lines]


def _observation(line: Mapping[str, Any], validation_loss: float | None) -> Observation:
    """What the detector sees of a step, live and refed: a line of metrics.jsonl.

    Args:
        line: earlier versions wrote no `scale_exhausted`.
        validation_loss: measured before the step, if it was.
    """
    return Observation(
        step=line["step"],
        loss=metrics.loss_of(line),
        gradient_norm=metrics.finite_or_nan(line["gradient_norm"]),
        loss_scale=line["loss_scale"],
        skipped=line["skipped"],
        scale_exhausted=line.get("scale_exhausted", False),
        validation_loss=validation_loss,
    )


class SpikeWatch:
    """Feeds the detector; its verdict stops the loop."""

    def __init__(
        self,
        detector: SpikeDetector,
        history: Sequence[Observation],
        validation_loss: float | None,
        tell: Callable[[Event], None],
    ) -> None:
        """Bring the detector to where the surviving steps lead.

        Args:
            detector: a new one.
            history: of the surviving steps.
            validation_loss: measured before the next step, if it was.
            tell: takes what the detector has to say of the steps to come.
        """
        self._detector, self._tell = detector, tell
        for observation in history:
            detector.update(observation)
        self.validation_loss = validation_loss
        """Measured since the last step."""

    def __call__(self, record: StepRecord) -> int:
        """Take in a finished step; EXIT_SPIKE where a spike is confirmed."""
        seen, self.validation_loss = self.validation_loss, None
        validation_loss = None if seen is None else metrics.finite_or_nan(seen)
        events = self._detector.update(_observation(dataclasses.asdict(record), validation_loss))
        for event in events:
            self._tell(event)
        return EXIT_SPIKE if any(event.kind == "spike" for event in events) else GO_ON


def history_before(
    step: int, lines: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]
) -> tuple[list[Observation], float | None]:
    """What an attempt that begins at `step` tells its detector first, and the pending measurement.

    Args:
        step: the attempt's first.
        lines: every line of metrics.jsonl.
        validation: every line of validation.jsonl.
    """
    before = [line for line in metrics.surviving(lines) if line["step"] < step]
    counted = metrics.surviving_validation(validation, before)
    measured = [line for line in counted if line["step"] <= step]
    pending = metrics.loss_of(measured[-1]) if measured and measured[-1]["step"] == step else None
    return observations(before, measured), pending
