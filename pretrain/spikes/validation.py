"""The spike detector's channel `validation`: jumps of the validation loss."""

from __future__ import annotations

import dataclasses
import math

from pretrain.spikes.observations import Evaluation, Event


class ValidationChannel:
    """Compares each evaluation with the last one of the same kind (`validation_id`).

    The best one would not do: a slowly rising loss is overfitting, which no rollback cures.
    """

    def __init__(self, limit: float, last_step: int) -> None:
        """Start without evaluations.

        Args:
            limit: a rise of more nats is suspected.
            last_step: a rise begins after it.
        """
        self._limit = limit
        self._validation_id = ""
        self._good = (last_step, math.nan)
        """Last step before the last good evaluation, and its loss; NaN where there is none yet."""
        self._suspicion: Event | None = None

    def judge(self, evaluation: Evaluation) -> list[Event]:
        """Judge an evaluation; the caller begins anew after a spike."""
        value, step = evaluation.loss, evaluation.updates - 1
        is_other = evaluation.validation_id != self._validation_id
        self._validation_id = evaluation.validation_id
        if is_other:
            self._good = (self._good[0], math.nan)
        last_good, before = self._good
        suspicion = self._suspicion
        # Where there is no evaluation before, every finite value is good.
        if not math.isfinite(value) or value > before + self._limit:
            onset = last_good + 1  # the earliest possible one
            event = Event("suspect", "validation", step, onset, value, before)
            if suspicion:
                return [dataclasses.replace(event, kind="spike")]
            self._suspicion = event
            return [event]
        if is_other and suspicion:
            # The next evaluation is compared with this one. Of the same weights, it has risen too.
            rise = suspicion.loss - suspicion.baseline
            risen = rise if suspicion.step == step and math.isfinite(rise) else 0.0
            self._good = (last_good, value - risen)
            return []
        self._good, self._suspicion = (step, value), None
        if suspicion is None:
            return []
        return [Event("healed", "validation", step, suspicion.onset, value, before)]
