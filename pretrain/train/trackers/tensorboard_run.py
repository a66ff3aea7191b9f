"""TensorBoard curves of a run; torch is imported when they are opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from pretrain.train.trackers.table import Shown

FOLDER = "tensorboard"
"""Of the event files, in the run's folder."""


class TensorBoard:
    """Writes TensorBoard scalars: one run for each attempt, and a stitched one.

    The stitched run shows only the surviving steps: what an attempt does again replaces what was
    there (TensorBoard's purge step). Its texts tell of rollbacks and spikes. Curves must not end a
    run: after an error nothing is written until `sync` is called.
    """

    def __init__(self, shown: Shown) -> None:
        """Open event files in the run's folder for an attempt."""
        self._folder, self._attempt = shown.folder / FOLDER, shown.attempt
        self._warn = shown.say
        self._writers: list[Any] = []  # SummaryWriter has no complete annotations
        self._warned = False
        self.sync(shown.first_step)

    def sync(self, step: int) -> None:
        """Open event files for the steps from `step` on, unless they are open."""
        if self._writers:
            return
        from torch.utils.tensorboard.writer import SummaryWriter

        with self._closing_on_error():
            self._writers.append(SummaryWriter(str(self._folder / f"attempt-{self._attempt:03d}")))
            stitched = str(self._folder / "stitched")
            self._writers.append(SummaryWriter(stitched, purge_step=step))

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # TensorFlow's, where that is installed, are not OSErrors
            if not self._warned:
                self._warn(f"WARNING: {self._folder}: no curves are written for now: {error}")
            self._warned = True
            for writer in self._writers:
                with contextlib.suppress(Exception):
                    writer.file_writer.close()  # ends its thread though it cannot write the rest
            self._writers = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write named numbers of a step."""
        with self._closing_on_error():
            for writer in self._writers:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
                writer.flush()

    def text(self, step: int, text: str) -> None:
        """Write a text about a step."""
        with self._closing_on_error():
            for writer in self._writers:
                writer.add_text("events", text, step)
                writer.flush()

    def close(self) -> None:
        """Nothing is left to end: every call writes all that it shows."""
