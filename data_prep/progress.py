"""Progress on stderr: a bar where a person watches, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, Self

_SECONDS_BETWEEN_LINES = 10.0


class ProgressReport:
    """Shows shards done, and documents and megabytes of text a second."""

    def __init__(self, num_shards: int, label: str) -> None:
        """Start at zero of `num_shards`."""
        self._num_shards = num_shards
        self._label = label
        self._started = self._shown = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=num_shards, desc=label, unit="shard", file=sys.stderr)

    def update(self, shards_done: int, documents: int, text_bytes: int) -> None:
        """Show what is done so far; documents and bytes of this run alone."""
        now = time.monotonic()
        elapsed_seconds = max(now - self._started, 1e-9)
        rates = (
            f"{documents} documents, {documents / elapsed_seconds:.0f} documents/s, "
            f"{text_bytes / 1e6 / elapsed_seconds:.1f} MB/s"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(rates, refresh=False)
            self._bar.update(shards_done - self._bar.n)
        elif shards_done == self._num_shards or now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            self.say(f"{shards_done} of {self._num_shards} shards, {rates}")

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
