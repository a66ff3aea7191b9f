"""Progress on stderr: a bar where a person watches, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

_SECONDS_BETWEEN_LINES = 10.0


class Done(NamedTuple):
    """What has been read and encoded so far."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    input_bytes: int = 0  # of the inputs as they lie on the disk, compressed

    @classmethod
    def total(cls, parts: Iterable["Done"]) -> "Done":
        """The sum of several."""
        return cls(*map(sum, zip(cls(), *parts, strict=True)))


class Progress(Protocol):
    """What a task is given to say how far it is."""

    def __call__(self, documents: int, text_bytes: int, tokens: int = 0) -> None:
        """Take the totals of the task so far."""


def rates(done: Done, input_bytes: int, elapsed_seconds: float) -> str:
    """What is done, how fast, and when it will all be done, in words.

    Args:
        done: So far.
        input_bytes: Of all inputs, `done` included; the expected end follows from the share read.
        elapsed_seconds: Since the start.
    """
    elapsed_seconds = max(elapsed_seconds, 1e-9)
    words = [
        f"{done.documents:,} documents",
        f"{done.documents / elapsed_seconds:,.0f} documents/s",
        f"{done.text_bytes / 1e6 / elapsed_seconds:.1f} MB/s",
    ]
    if done.tokens:
        words.append(f"{done.tokens / 1e6 / elapsed_seconds:.2f} M tokens/s")
    left_bytes = input_bytes - done.input_bytes
    if done.input_bytes and left_bytes > 0:
        seconds = left_bytes * elapsed_seconds / done.input_bytes
        words.append(f"{done.input_bytes / input_bytes:.0%} read, {duration(seconds)} to go")
    return ", ".join(words)


def duration(seconds: float) -> str:
    """A length of time in at most two units, as "2 h 05 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class ProgressReport:
    """Shows tasks done, rates, and the time that is left."""

    def __init__(self, num_shards: int, label: str, input_bytes: int = 0) -> None:
        """Start at zero of `num_shards`, made from `input_bytes` in all."""
        self._num_shards = num_shards
        self._label = label
        self._input_bytes = input_bytes
        self._started = self._shown = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            # The time that tqdm expects would count shards; ours counts bytes.
            layout = "{desc}: {n_fmt}/{total_fmt} shards |{bar:20}| {elapsed}{postfix}"
            self._bar = tqdm(total=num_shards, desc=label, bar_format=layout, file=sys.stderr)

    def update(self, shards_done: int, done: Done) -> None:
        """Show what is done so far, by this run alone."""
        now = time.monotonic()
        words = rates(done, self._input_bytes, now - self._started)
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update(shards_done - self._bar.n)
            self._bar.refresh()
        elif shards_done == self._num_shards or now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            self.say(f"{shards_done} of {self._num_shards} shards, {words}")

    def say(self, message: str) -> None:
        """Print a line of its own."""
        if self._bar is not None:
            self._bar.write(f"{self._label}: {message}", file=sys.stderr)
        else:
            print(f"{self._label}: {message}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        """Return the report itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
