"""TensorBoard curves of a run; torch is imported when they are opened."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
"""Of the event files, in the run's folder."""
_FLUSH_SECONDS = 5.0
"""Between two writes to the event file, each of which opens it."""


class TensorBoard:
    """Writes TensorBoard scalars: the surviving steps, each an event.

    Steps that an attempt repeats replace the earlier ones (TensorBoard's purge step). An error does
    not end the run: nothing is written until `sync` is called.
    """

    def __init__(self, run: Path, first_step: int, say: Callable[[str], object]) -> None:
        """Open an event file in a run's folder for an attempt; `say` prints a message."""
        self._folder, self._warn = run / FOLDER, say
        self._writer: Any = None  # SummaryWriter has no complete annotations
        self._warned, self._flushed = False, -math.inf
        self.sync(first_step)

    def sync(self, step: int) -> None:
        """Write buffered events; open an event file for steps from `step` on, if none is."""
        self.close()
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            with self._closing_on_error():
                self._writer = SummaryWriter(str(self._folder), purge_step=step)

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # TensorFlow's, where that is installed, are not OSErrors
            if not self._warned:
                self._warn(f"WARNING: {self._folder}: no curves are written for now: {error}")
            self._warned = True
            with contextlib.suppress(Exception):
                self._writer.file_writer.close()  # ends its thread though it cannot write the rest
            self._writer = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the named values of a step."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        with self._closing_on_error():
            named = [Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
            self._writer.file_writer.add_summary(Summary(value=named), step)
            if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
                self._flush()

    def _flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write buffered events."""
        if self._writer is not None:
            with self._closing_on_error():
                self._flush()
