"""Where a run is: the line that a terminal or a log shows."""

import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from data_prep.common.wording import duration
from pretrain.loop.protocols import StepRecord
from pretrain.records.metrics import Line, line_of
from pretrain.records.wording import clock_time, format_number

_SECONDS, _RENEW_SECONDS = 10.0, 0.5
"""Between two lines where they are not renewed, and between two renewals."""
_ERASE_LINE = "\r\x1b[K"
RECENT = 50
"""The time left is estimated from the median duration of this many steps."""


class ProgressPrinter:
    """Shows where a run is: a line that is renewed on a terminal, else one now and then.

    It is an observer of steps, or is given lines of metrics.jsonl (`show`). What else is printed
    meanwhile goes through `say`.
    """

    def __init__(self, last_step: int, prefix: str = "") -> None:
        """Show nothing yet.

        Args:
            last_step: updates of the whole run. Its line is always shown, and stays.
            prefix: of each line.
        """
        self._last_step, self._prefix, self._renews = last_step, prefix, sys.stdout.isatty()
        self._seconds = _RENEW_SECONDS if self._renews else _SECONDS
        self._next, self._recent = 0.0, deque[Line](maxlen=RECENT)
        self._newest: Line | None = None
        self._shown = False
        """Whether the cursor is at the end of a line that is to be renewed."""

    def __call__(self, record: StepRecord) -> None:
        """Show a finished step if it is time."""
        self._recent.append(line_of(record))
        self.show(self._recent)

    def show(self, lines: Sequence[Line]) -> None:
        """Show the newest of some lines if it is time and it was not shown before."""
        now, newest = time.monotonic(), lines[-1]
        is_last = newest["step"] + 1 == self._last_step
        if newest == self._newest or (now < self._next and not is_last):
            return
        self._next, self._newest = now + self._seconds, newest
        end = clock_time(seconds_left(lines, self._last_step))
        text = f"{progress_line(lines, self._last_step)}  ends {end}"
        if not self._renews:
            self.say(text)
            return
        columns = shutil.get_terminal_size().columns - 1  # the cursor needs a place, too
        self._shown = not is_last
        self._write(_ERASE_LINE + f"{self._prefix}{text}"[:columns] + "\n" * is_last)

    def say(self, text: str) -> None:
        """Print a line of its own; one that is to be renewed stays as it is."""
        self._write("\n" * self._shown + f"{self._prefix}{text}\n")
        self._shown = False

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def progress_line(records: Sequence[Line], last_step: int) -> str:
    """Describe the newest step and the time left.

    Args:
        records: lines of metrics.jsonl, at least one; the last one is described.
        last_step: updates of the whole run.
    """
    record, done = records[-1], records[-1]["step"] + 1
    speed, left = record["tokens"] / record["seconds"], seconds_left(records, last_step)
    used = ""
    if "mfu" in record:
        used = f"  {record['mfu']:.1%} MFU ({record['computed_mfu']:.1%} by the pairs computed)"
    return (
        f"step {done:>{len(str(last_step))}}/{last_step}  "
        f"loss {format_number(record['loss'], '.4f')}  "
        f"{'?' if left is None else duration(left)} left  "  # a terminal cuts off the end
        f"gradient norm {format_number(record['gradient_norm'], '.2f')}  "
        f"lr {record['learning_rate']:.2e}  "
        f"{speed:,.0f} tokens/s{used}"
    )


def seconds_left(records: Sequence[Line], last_step: int) -> float | None:
    """Estimate the time until the last step; None where no step says how long one takes.

    It is the median duration of the last RECENT steps, times the number of steps left. The first
    step of an attempt compiles kernels and does not count.
    """
    recent = [records[index] for index in range(-min(len(records), RECENT + 1), 0)]
    timed = [
        line["seconds"]
        for before, line in pairwise(recent)
        if before.get("attempt") == line.get("attempt")
    ]
    if not timed:
        return None
    # The lower one of two: the second step may compile what the first did not need.
    return (last_step - records[-1]["step"] - 1) * statistics.median_low(timed)
