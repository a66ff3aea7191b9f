"""How long each rank works in a step by itself, and which ranks the others wait for.

All ranks finish a step together, so its duration does not tell which of them is slow. Each rank
therefore measures what it does alone: loading its batch, and the forward pass. Now and then it
writes the median of its last steps to a small file in the run's folder, which rank 0 and `status`
read. This adds no collective to a step, and a rank that stands still can be named, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep import files
from pretrain.loop import Batches, MicroBatch

FOLDER = "ranks"
WRITE_SECONDS = 30.0
"""Between two writes of a rank."""
_STEPS = 50
"""Last steps whose median counts."""
_LEAST_STEPS = 20
SLOW_FACTOR = 1.25
"""A rank is slow if it works so many times as long as the median of the others."""
_FORWARD_SHARE = 3.0
"""A backward pass costs two forward passes. It is not measured, as its end waits for the others."""


@dataclasses.dataclass(frozen=True)
class Pace:
    """What a rank wrote last."""

    token: str
    """Of the attempt."""
    rank: int
    host: str
    step: int
    """Updates done."""
    seconds: float
    """Median time that the rank works in a step by itself."""


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for."""

    rank: int
    host: str
    seconds: float
    """As in Pace."""
    others_seconds: float
    """The median of the other ranks."""

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


class PaceWriter:
    """Writes the pace of one rank."""

    def __init__(
        self, run: Path, token: str, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin without steps.

        Args:
            run: folder of the run.
            token: of the attempt.
            rank: of this process.
            clock: in seconds.
        """
        self._path = run / FOLDER / f"{rank:05d}.json"
        self._token, self._rank, self._clock = token, rank, clock
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._next = clock() + WRITE_SECONDS

    def add(self, steps: int, seconds: float) -> bool:
        """Count a step; return whether it was time to write.

        Args:
            steps: updates done.
            seconds: see `own_seconds`.
        """
        self._seconds.append(seconds)
        now = self._clock()
        if len(self._seconds) < _LEAST_STEPS or now < self._next:
            return False
        self._next = now + WRITE_SECONDS
        median = statistics.median(self._seconds)
        pace = Pace(self._token, self._rank, socket.gethostname(), steps, median)
        with contextlib.suppress(OSError):  # on a full disk training continues
            files.replace_json(self._path, dataclasses.asdict(pace))
        return True


def read(run: Path, token: str) -> list[Pace]:
    """Return the paces that the ranks of an attempt wrote last; what cannot be read is left out."""
    found = []
    for path in sorted((run / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Pace(**json.loads(path.read_bytes())))
    return [pace for pace in found if pace.token == token]


def slow_ranks(paces: Sequence[Pace]) -> list[SlowRank]:
    """Return the ranks that the others wait for, slowest first."""
    slow = []
    for pace in paces:
        others = [other.seconds for other in paces if other is not pace]
        if others and pace.seconds > SLOW_FACTOR * statistics.median(others):
            usual = statistics.median(others)
            slow.append(SlowRank(pace.rank, pace.host, pace.seconds, usual))
    return sorted(slow, key=lambda rank: -rank.seconds)


class TimedBatches:
    """Batches whose loading is timed."""

    def __init__(self, batches: Batches) -> None:
        """Wrap `batches`."""
        self._batches, self._seconds = batches, 0.0
        self.seed, self.epoch = batches.seed, batches.epoch

    def micro_batches(self, step: int, rank: int, world_size: int) -> Sequence[MicroBatch]:
        """Return those of the wrapped batches."""
        started = time.perf_counter()
        result = self._batches.micro_batches(step, rank, world_size)
        self._seconds += time.perf_counter() - started
        return result

    def take(self) -> float:
        """Return the seconds since the last call that were spent on loading."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
