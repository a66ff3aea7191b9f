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
        self._onset: int | None = None
        self._rise = (-1, math.nan)
        """Updates before the evaluation that raised the suspicion, and its rise in nats."""

    def judge(self, evaluation: Evaluation) -> list[Event]:
        """Judge an evaluation; the caller begins anew after a spike."""
        value, step = evaluation.loss, evaluation.updates - 1
        is_other = evaluation.validation_id != self._validation_id
        self._validation_id = evaluation.validation_id
        if is_other:
            self._good = (self._good[0], math.nan)
        last_good, before = self._good
        suspected = self._onset
        # Where there is no evaluation before, every finite value is good.
        if not math.isfinite(value) or value > before + self._limit:
            onset = self._onset = last_good + 1  # the earliest possible one
            event = Event("suspect", "validation", step, onset, value, before)
            if suspected is None:
                self._rise = (evaluation.updates, value - before)
                return [event]
            return [dataclasses.replace(event, kind="spike")]
        if is_other and suspected is not None:
            # The next evaluation is compared with this one. Of the same weights, it has risen too.
            updates, rise = self._rise
            risen = rise if updates == evaluation.updates and math.isfinite(rise) else 0.0
            self._good = (last_good, value - risen)
            return []
        self._good, self._onset = (step, value), None
        if suspected is None:
            return []
        return [Event("healed", "validation", step, suspected, value, before)]
