"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from data_prep.common.wording import duration

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_BARS = 0.1


class Done(NamedTuple):
    """Amount of work done so far."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    input_bytes: int = 0  # of the input files as stored, that is compressed


# Callback that receives the amount of work done so far.
Progress = Callable[[Done], None]


def rates(done: Done, input_bytes: int, elapsed_seconds: float) -> str:
    """Describe the work done, its speed, and the expected remaining time.

    Args:
        done: Work done so far.
        input_bytes: Size of all inputs; the remaining time follows from the share read.
        elapsed_seconds: Time since the start.
    """
    elapsed_seconds = max(elapsed_seconds, 1e-9)
    parts = [
        f"{done.documents:,} documents",
        f"{done.documents / elapsed_seconds:,.0f} documents/s",
        f"{done.text_bytes / 1e6 / elapsed_seconds:.1f} MB/s",
    ]
    if done.tokens:
        parts.append(f"{done.tokens / 1e6 / elapsed_seconds:.2f} M tokens/s")
    left_bytes = input_bytes - done.input_bytes
    if done.input_bytes and left_bytes > 0:
        seconds = left_bytes * elapsed_seconds / done.input_bytes
        parts.append(f"{done.input_bytes / input_bytes:.0%} read, {duration(seconds)} left")
    return ", ".join(parts)


class ProgressReport:
    """Shows the number of finished shards or inputs, the speed, and the remaining time."""

    def __init__(
        self, command: str, num_parts: int, input_bytes: int = 0, unit: str = "shards"
    ) -> None:
        """Start the clock.

        Args:
            command: Begins each line.
            num_parts: Shards or inputs to finish.
            input_bytes: Size of what is read; the remaining time follows from it.
            unit: What the parts are.
        """
        from tqdm import tqdm

        self._command, self._num_parts, self._unit = command, num_parts, unit
        self._parts_done = 0
        self._done = Done()
        self._input_bytes = input_bytes
        self._started = self._shown = time.monotonic()
        # tqdm estimates the remaining time from the parts, `rates` from bytes.
        layout = f"{command}: {{n_fmt}}/{{total_fmt}} {unit} |{{bar:20}}| {{elapsed}}{{postfix}}"
        # None disables the bar where stderr is not a terminal.
        self._bar = tqdm(total=num_parts, bar_format=layout, file=sys.stderr, disable=None)

    def update(self, done: Done) -> None:
        """Show the work that this run has done so far, unless that was shown a moment ago."""
        self._done, now = done, time.monotonic()
        pause = _SECONDS_BETWEEN_LINES if self._bar.disable else _SECONDS_BETWEEN_BARS
        if self._parts_done < self._num_parts and now - self._shown < pause:
            return
        self._shown = now
        description = rates(done, self._input_bytes, now - self._started)
        if self._bar.disable:
            self.say(f"{self._parts_done} of {self._num_parts} {self._unit}, {description}")
        else:
            self._bar.set_postfix_str(description, refresh=False)
            self._bar.update(self._parts_done - self._bar.n)
            self._bar.refresh()

    def finish_part(self, done: Done | None = None) -> None:
        """Count one more finished part."""
        self._parts_done += 1
        self.update(done or self._done)

    def say(self, message: str) -> None:
        """Print a separate line."""
        self._bar.write(f"{self._command}: {message}", file=sys.stderr)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()
