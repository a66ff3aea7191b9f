"""How long each rank works in a step by itself, and which rank the others wait for.

All ranks finish a step together, so its duration does not tell which of them is slow. Each rank
therefore measures what it does alone: loading its batch, and the forward pass. It tells rank 0
before the next step, whose record names the slowest rank (figures.py). A rank that stands still
ends no step: the supervisor notices the silence.
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

STEPS = 50
"""Last steps whose medians count."""
LEAST_STEPS = 20
SLOW_FACTOR = 1.25
"""A rank is slow if it works so many times as long as the median of the others."""
_FORWARD_SHARE = 3.0
"""A backward pass costs two forward passes. It is not measured, as its end waits for the others."""


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for."""

    rank: int
    host: str
    seconds: float
    """Median time that it works in a step by itself."""
    others_seconds: float
    """The same of the median of the other ranks."""

    @property
    def who(self) -> str:
        """The rank with its host."""
        return f"rank {self.rank} on {self.host}"

    def __str__(self) -> str:
        """Describe it in a sentence."""
        return (
            f"{self.who} is slow: it works {self.seconds:.3g} s in a step by "
            f"itself, the others {self.others_seconds:.3g} s; every step waits for it"
        )


def own_seconds(data_seconds: float, forward_seconds: float) -> float:
    """Return the time that a rank works in a step by itself.

    Args:
        data_seconds: time to load its batch.
        forward_seconds: time of its forward passes.
    """
    return data_seconds + _FORWARD_SHARE * forward_seconds


def slow_rank(
    lines: Sequence[Mapping[str, Any]], hosts: Sequence[str], accelerator: str = ""
) -> SlowRank | None:
    """Return the rank that the others wait for in most of the last steps, if there is one.

    Ranks that share the cores of one machine differ by what else runs there: none of them is slow.

    Args:
        lines: figures of an attempt's steps, oldest first; the last STEPS count.
        hosts: of each rank.
        accelerator: as environment.json has it.
    """
    if accelerator == "cpu" and len({*hosts}) == 1:
        return None
    known = [line for line in [*lines][-STEPS:] if "slowest_rank" in line]
    if len(known) < LEAST_STEPS:
        return None
    ((rank, times),) = Counter(line["slowest_rank"] for line in known).most_common(1)
    own = [line for line in known if line["slowest_rank"] == rank]
    seconds = statistics.median(line["slowest_rank_seconds"] for line in own)
    others = statistics.median(line["other_ranks_seconds"] for line in own)
    is_slow = 2 * times > len(known) and seconds > SLOW_FACTOR * others
    return SlowRank(rank, hosts[rank], seconds, others) if is_slow else None
