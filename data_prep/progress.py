"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from data_prep.common.wording import duration

_SECONDS_BETWEEN_LINES = 10.0


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
    """Shows the number of finished shards, the speed, and the remaining time."""

    def __init__(self, num_shards: int, input_bytes: int = 0) -> None:
        """Start the clock for `num_shards` shards made from `input_bytes` of input."""
        self._num_shards = num_shards
        self._shards_done = 0
        self._done = Done()
        self._input_bytes = input_bytes
        self._started = self._shown = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            # tqdm estimates the remaining time from shards, `rates` from bytes.
            layout = "{desc}: {n_fmt}/{total_fmt} shards |{bar:20}| {elapsed}{postfix}"
            self._bar = tqdm(total=num_shards, desc="prepare", bar_format=layout, file=sys.stderr)

    def update(self, done: Done) -> None:
        """Show the work that this run has done so far."""
        self._done = done
        now = time.monotonic()
        description = rates(done, self._input_bytes, now - self._started)
        if self._bar is not None:
            self._bar.set_postfix_str(description, refresh=False)
            self._bar.update(self._shards_done - self._bar.n)
            self._bar.refresh()
        elif self._shards_done == self._num_shards or now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            self.say(f"{self._shards_done} of {self._num_shards} shards, {description}")

    def finish_shard(self) -> None:
        """Count one more finished shard."""
        self._shards_done += 1
        self.update(self._done)

    def say(self, message: str) -> None:
        """Print a separate line."""
        if self._bar is not None:
            self._bar.write(f"prepare: {message}", file=sys.stderr)
        else:
            print(f"prepare: {message}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
