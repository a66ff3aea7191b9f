"""State of the spike detector's open suspicions."""

from __future__ import annotations

import dataclasses
import math

from pretrain.spikes.statistics import FlagWindow


@dataclasses.dataclass
class Suspicion:
    """A rise of the loss that has neither healed nor been confirmed yet."""

    channel: str
    onset: int
    first_record: int
    """Number of the record of the onset."""
    deadline: int
    """Number of the record at which the rise is confirmed."""
    baseline: float
    fall: float
    """Change of the baseline, in nats, while the number of records grows by a factor e."""
    deviation: float
    losses: list[float]
    """Losses from the onset on."""
    losses_before: int
    """How many of them came before the suspicion; `LowestLevel` contains these."""

    last_extrapolated: int
    """Number of the last record to which the baseline is extrapolated: the first deadline. Much
    further, a loss falls less than its slope predicts, and a rise would seem to grow."""

    def baseline_at(self, record: int) -> float:
        """The baseline, extrapolated to a record."""
        record = min(record, self.last_extrapolated)
        return self.baseline + self.fall * math.log(record / self.first_record)


@dataclasses.dataclass
class Channel:
    """A channel whose records are flagged, and its suspicion."""

    name: str
    flags: FlagWindow
    suspected: bool = False
    onset: int = 0
    since: int = 0
    """Number of the record at which the channel was suspected."""
