"""Input and events of the spike detector."""

import dataclasses
import math
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Observation:
    """The measurements of one step."""

    step: int
    loss: float
    """Nats per target."""
    gradient_norm: float | None = None
    """Before clipping; None where it was not recorded, NaN where it was not finite."""
    loss_scale: float = 1.0
    """Loss scale of fp16; 1 in other precisions."""
    skipped: bool = False
    """Whether the update was skipped because its gradient was not finite."""
    scale_exhausted: bool = False
    """Whether fp16 skipped the update at its smallest loss scale, which cannot be lowered."""

    @property
    def corrupts_weights(self) -> bool:
        """Whether an update was applied with a loss or a gradient that is not finite."""
        finite = math.isfinite(self.loss) and math.isfinite(self.gradient_norm or 0.0)
        return not (self.skipped or finite)

    @property
    def is_overflow(self) -> bool:
        """Whether fp16 skipped the update to lower its loss scale, or could not lower it."""
        scaled = math.isfinite(self.loss) and self.loss_scale > 1.0
        return self.skipped and (self.scale_exhausted or scaled)

    @property
    def is_non_finite_skip(self) -> bool:
        """Whether an update was skipped for a reason that loss scaling does not explain."""
        return self.skipped and not self.is_overflow


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A measurement on the validation split."""

    updates: int
    """Number of updates before it."""
    loss: float
    """Nats per target; NaN where it was not finite."""
    validation_id: str = ""
    """Names what was measured: which blocks, and with which loss."""


Seen = Observation | Evaluation
"""A record that the detector judges."""


def in_order(observations: Iterable[Observation], evaluations: Iterable[Evaluation]) -> list[Seen]:
    """Order steps and evaluations as a run saw them: one after n updates comes before step n."""
    seen: list[Seen] = [*evaluations, *observations]
    return sorted(seen, key=lambda s: s.updates if isinstance(s, Evaluation) else s.step)


@dataclasses.dataclass(frozen=True)
class Event:
    """An event that the detector reports."""

    kind: str
    """suspect, healed, new-level or spike"""
    channel: str
    """fast, slow, drift, gradient-norm, loss-scale, validation or non-finite"""
    step: int
    """Step of the record that led to the finding; the last one before an evaluation that did."""
    onset: int
    """First step of the rise."""
    loss: float
    """In nats: the median since the suspicion's onset on the channels fast and slow, that of a
    block of records on drift, the new level of a new level, the validation loss on validation, and
    the loss of the step on the others."""
    baseline: float
    """The level before the rise, in nats; NaN where none is known yet."""
