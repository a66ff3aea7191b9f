"""Robust running statistics of a noisy series, for the spike detector.

Each value costs a few microseconds: windows are kept sorted by bisection, and the minimum of a
moving window is the head of a monotonic queue.
"""

import bisect
import itertools
import math
from collections import deque
from collections.abc import Sequence

_STANDARD_DEVIATIONS_PER_QUARTILE_RANGE = 0.7413
"""Of a normal distribution."""
_CENTER_WINDOW = 32
"""Values whose median the next one is compared with. A longer window lags behind a falling loss."""
TOLERANCE = 2
"""Records of the last `patience + TOLERANCE` that may differ from the others: unflagged ones while
flags are raised, flagged ones while they are calm."""


class SortedWindow:
    """The last `size` values, with their order statistics."""

    def __init__(self, size: int) -> None:
        """Create an empty window."""
        self._size = size
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        """Number of values in the window."""
        return len(self._values)

    def append(self, value: float) -> None:
        """Add a value; a full window drops its oldest one."""
        if len(self._values) == self._size:
            self._remove(self._values.popleft())
        self._values.append(value)
        bisect.insort(self._sorted, value)

    def pop(self) -> None:
        """Remove the newest value."""
        self._remove(self._values.pop())

    def _remove(self, value: float) -> None:
        del self._sorted[bisect.bisect_left(self._sorted, value)]

    def median(self) -> float:
        """Median of the values."""
        half, odd = divmod(len(self._sorted), 2)
        return self._sorted[half] if odd else (self._sorted[half - 1] + self._sorted[half]) / 2

    def deviation(self) -> float:
        """Robust standard deviation: that of a normal distribution with the same quartiles."""
        quarter = len(self._sorted) // 4
        quartile_range = self._sorted[-1 - quarter] - self._sorted[quarter]
        return _STANDARD_DEVIATIONS_PER_QUARTILE_RANGE * quartile_range


class Level:
    """Median and scatter of a noisy series, from which the caller omits outliers."""

    def __init__(self, window: int, minimum: int, smallest_deviation: float) -> None:
        """Start without values.

        Args:
            window: number of values whose scatter is measured.
            minimum: number of values before the level is known.
            smallest_deviation: lower bound on the deviation.
        """
        self._minimum, self._smallest = minimum, smallest_deviation
        self._center = SortedWindow(min(_CENTER_WINDOW, window))
        self._residuals = SortedWindow(window)
        self.median = math.nan

    def append(self, value: float) -> None:
        """Add a value that is not an outlier."""
        # Residuals are taken from the median before each value. Otherwise a falling level would
        # count as scatter.
        self._residuals.append(value - self.median if len(self._center) else 0.0)
        self._center.append(value)
        self.median = self._center.median()

    @property
    def is_known(self) -> bool:
        """Whether there are enough values to judge by."""
        return len(self._residuals) >= self._minimum

    @property
    def deviation(self) -> float:
        """Robust standard deviation of one value around the median."""
        return max(self._residuals.deviation(), self._smallest)


class FlagWindow:
    """Counts the flagged ones among the last `size` records."""

    def __init__(self, patience: int, size: int | None = None) -> None:
        """Start with no flagged records.

        Args:
            patience: number of flagged records that raises the window.
            size: number of records; by default `patience + TOLERANCE`.
        """
        self._patience = patience
        self._last: deque[tuple[int, bool]] = deque(maxlen=size or patience + TOLERANCE)
        self._count = 0

    def append(self, step: int, flag: bool) -> None:
        """Record whether this step was flagged."""
        if len(self._last) == self._last.maxlen:
            self._count -= self._last[0][1]
        self._last.append((step, flag))
        self._count += flag

    @property
    def is_raised(self) -> bool:
        """True once `patience` of the records are flagged."""
        return self._count >= self._patience

    @property
    def is_calm(self) -> bool:
        """True while at most TOLERANCE of the records, and fewer than `patience`, are flagged."""
        return self._count <= min(TOLERANCE, self._patience - 1)

    @property
    def is_clear(self) -> bool:
        """True while no record is flagged."""
        return self._count == 0

    @property
    def onset(self) -> int:
        """Step of the first flagged record."""
        return next(step for step, flag in self._last if flag)


class LowestLevel:
    """Running median of the last losses, and its recent minimum.

    A rise is measured from the lowest level, not from a mean of earlier ones. On a falling loss the
    lowest level is the newest, so the fall neither hides a rise nor looks like one where it ends.
    """

    def __init__(self, size: int, window: int) -> None:
        """Start without losses.

        Args:
            size: number of losses in a median.
            window: number of records whose medians the minimum is taken of.
        """
        self._size, self._window = size, window
        self._losses = SortedWindow(size)
        self._medians: deque[tuple[int, float]] = deque(maxlen=window)
        self._minima: deque[tuple[int, float]] = deque()
        self.rise = 0.0
        """The median minus its recent minimum, in nats; 0 until there are `size` losses."""

    def append(self, record: int, loss: float) -> None:
        """Add the loss of a record, by its number."""
        self._losses.append(loss)
        if len(self._losses) < self._size:
            return
        median = self._losses.median()
        self._medians.append((record, median))
        # An older median that is not lower can no longer become the minimum.
        while self._minima and self._minima[-1][1] >= median:
            self._minima.pop()
        self._minima.append((record, median))
        while self._minima[0][0] <= record - self._window:
            self._minima.popleft()
        self.rise = median - self._minima[0][1]

    @property
    def lowest(self) -> tuple[int, float]:
        """Number of the record in the middle of the lowest median, and that median."""
        record, median = self._minima[0]
        return record - self._size // 2, median

    def fall(self) -> float:
        """Change of the level, in nats, while the number of records grows by a factor e.

        This is the first order of a power law: the loss falls evenly in the logarithm of time.

        Returns:
            0 or less; 0 while too few records are known.
        """
        if not self._minima:
            return 0.0
        (then, before), (now, low) = self._medians[0], self._minima[0]
        if now - then < max(1, self._window // 2):
            return 0.0
        # A median describes the middle of its records, half of them before the newest.
        half = self._size // 2
        return min(0.0, low - before) / math.log((now - half) / (then - half))

    def forget(self, count: int) -> None:
        """Forget the newest losses, which rise; the minima stay."""
        for _ in range(min(count, len(self._losses))):
            self._losses.pop()
        self.rise = 0.0


def change_point(distances: Sequence[float], height: float) -> int:
    """Index at which the last values rose above the level before them.

    It is the split with the largest sum of what follows it, each value less half the height: the
    last place at which a cumulative sum control chart stood at zero (Page 1954, Biometrika 41).
    Values are clipped to the height, so that a single outlier does not date a rise.

    Args:
        distances: distances from the level before, in standard deviations, oldest first; not empty.
        height: smallest rise to be dated, in standard deviations.
    """
    rises = (max(-height, min(height, each)) - height / 2 for each in reversed(distances))
    sums = [*itertools.accumulate(rises)]
    return len(sums) - 1 - sums.index(max(sums))
