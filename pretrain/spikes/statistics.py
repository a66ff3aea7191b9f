"""Robust statistics of a noisy series, a number at a time: what the spike detector judges by.

Each costs a few microseconds a number: sorted windows are kept sorted by bisection, and the lowest
of a moving window is the head of a queue that only rises.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence

_QUARTILES_TO_DEVIATION = 0.7413
"""A normal distribution's standard deviation over the distance of its quartiles."""
_CENTER = 32
"""Numbers whose median the next one is compared with: few, or a falling loss leaves it behind."""
SLACK = 2


class SortedWindow:
    """The last `size` numbers, with their order statistics at hand."""

    def __init__(self, size: int) -> None:
        """Empty."""
        self._size = size
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._values)

    def append(self, value: float) -> float | None:
        """Take one in; returns the one that fell out, if the window was full."""
        fallen = None
        if len(self._values) == self._size:
            fallen = self._values.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, fallen)]
        self._values.append(value)
        bisect.insort(self._sorted, value)
        return fallen

    def pop(self) -> None:
        """Forget the newest."""
        value = self._values.pop()
        del self._sorted[bisect.bisect_left(self._sorted, value)]

    def median(self) -> float:
        """The middle one, or the mean of the two."""
        half, odd = divmod(len(self._sorted), 2)
        return self._sorted[half] if odd else (self._sorted[half - 1] + self._sorted[half]) / 2

    def deviation(self) -> float:
        """Robust standard deviation: that of a normal distribution with the same quartiles."""
        quarter = len(self._sorted) // 4
        return _QUARTILES_TO_DEVIATION * (self._sorted[-1 - quarter] - self._sorted[quarter])


class Level:
    """Where a noisy number stands and how far it scatters; the caller leaves outliers out."""

    def __init__(self, window: int, minimum: int, smallest_deviation: float) -> None:
        """Nothing is known.

        Args:
            window: numbers whose scatter is measured.
            minimum: numbers that it takes to judge by.
            smallest_deviation: what scatters less is taken to scatter as much.
        """
        self._minimum, self._smallest = minimum, smallest_deviation
        self._center = SortedWindow(min(_CENTER, window))
        self._residuals = SortedWindow(window)
        self.median = math.nan

    def learn(self, value: float) -> None:
        """Take in what is no outlier."""
        # Each is compared with the median of its own time, or a fall would count as scatter.
        self._residuals.append(value - self.median if len(self._center) else 0.0)
        self._center.append(value)
        self.median = self._center.median()

    @property
    def known(self) -> bool:
        """Whether there is enough to judge by."""
        return len(self._residuals) >= self._minimum

    @property
    def deviation(self) -> float:
        """Of one value around the median."""
        return max(self._residuals.deviation(), self._smallest)


class Persistence:
    """Whether `patience` of the last `size` records were out of line."""

    def __init__(self, patience: int, size: int | None = None) -> None:
        """None was.

        Args:
            patience: records that it takes.
            size: records that are looked at; by default SLACK more than it takes.
        """
        self._patience = patience
        self._last: deque[tuple[int, bool]] = deque(maxlen=size or patience + SLACK)
        self._count = 0

    def append(self, step: int, flag: bool) -> None:
        """Take in whether a step's record was."""
        if len(self._last) == self._last.maxlen:
            self._count -= self._last[0][1]
        self._last.append((step, flag))
        self._count += flag

    @property
    def raised(self) -> bool:
        """Whether so many were."""
        return self._count >= self._patience

    @property
    def calm(self) -> bool:
        """Whether so many were not."""
        return self._count <= min(SLACK, self._patience - 1)

    @property
    def none(self) -> bool:
        """Whether none of them was."""
        return self._count == 0

    @property
    def onset(self) -> int:
        """Step of the first that was."""
        return next(step for step, flag in self._last if flag)


class LowestLevel:
    """The running median of the last losses, and the lowest that it has been lately.

    A rise is measured from the lowest level, not from a mean of those before: on a falling loss
    that is the newest, so that the fall neither hides a rise nor, where it ends, looks like one.
    """

    def __init__(self, size: int, window: int) -> None:
        """Nothing is known.

        Args:
            size: losses of a median.
            window: medians of which the lowest is taken.
        """
        self._size, self._window = size, window
        self._losses = SortedWindow(size)
        self._medians: deque[tuple[int, float]] = deque(maxlen=window)
        self._lows: deque[tuple[int, float]] = deque()
        self.rise = 0.0
        """Of the median over its lowest, in nats; 0 until there are losses enough."""

    def append(self, record: int, loss: float) -> None:
        """Take one in."""
        self._losses.append(loss)
        if len(self._losses) < self._size:
            return
        median = self._losses.median()
        self._medians.append((record, median))
        # What is neither lower nor newer will never be the lowest.
        while self._lows and self._lows[-1][1] >= median:
            self._lows.pop()
        self._lows.append((record, median))
        while self._lows[0][0] <= record - self._window:
            self._lows.popleft()
        self.rise = median - self._lows[0][1]

    @property
    def lowest(self) -> tuple[int, float]:
        """The number of the middle one of its records, and the level."""
        record, median = self._lows[0]
        return record - self._size // 2, median

    def fall(self) -> float:
        """Nats that the level falls by while the number of records grows by a factor e.

        By a power law, of which this is the first order, a loss falls evenly in the logarithm of
        time. 0 where too little is known.
        """
        if not self._lows:
            return 0.0
        (then, before), (now, low) = self._medians[0], self._lows[0]
        if now - then < max(1, self._window // 2):
            return 0.0
        # Half a window back from each: where the middle of its records lies.
        half = self._size // 2
        return min(0.0, low - before) / math.log((now - half) / (then - half))

    def forget(self, count: int) -> None:
        """Forget the newest losses: a rise that has healed. What was lowest stays."""
        for _ in range(min(count, len(self._losses))):
            self._losses.pop()
        self.rise = 0.0


def change_point(distances: Sequence[float], height: float) -> int:
    """Where the last numbers rose above the level before them.

    The split with the largest sum of what follows it, each number less half the height: the last
    place at which a cumulative sum control chart stood at zero (Page 1954, Biometrika 41). What is
    far off is cut to the height, so that a single outlier does not date a rise.

    Args:
        distances: from the level before, in standard deviations, oldest first; at least one.
        height: of the least rise to be dated, in standard deviations.
    """
    best, total, place = -math.inf, 0.0, len(distances) - 1
    for index in range(len(distances) - 1, -1, -1):
        total += max(-height, min(height, distances[index])) - height / 2
        if total > best:
            best, place = total, index
    return place
