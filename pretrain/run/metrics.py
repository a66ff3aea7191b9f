"""metrics.jsonl, validation.jsonl and TensorBoard: what a run measured. Imports torch only inside.

metrics.jsonl has a line a step, in the order in which steps were done: after a rollback the steps
repeat under a higher attempt number. `surviving` reads the lineage that counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from data_prep import files
from pretrain.loop import StepRecord

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
NEEDED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        METRICS: frozenset(
            {"attempt", "step", "loss", "gradient_norm", "learning_rate", "seed", "tokens"}
            | {"seconds", "loss_scale", "skipped", "blocks"}
        ),
        VALIDATION: frozenset({"attempt", "step", "loss", "perplexity", "subsets"}),
    }
)
"""What every reader of these files takes for granted of a line."""
RECENT = 50
"""Last steps whose median duration gives the time left."""


class JsonLines:
    """Appends records to a file, a line each, at once; a number that is not finite is null.

    `write` never fails: a line that a full disk refuses, or takes only a part of, is written with
    a later one. The lines since the last `sync` are kept in memory for that. A run is ended by the
    third failed save in a row, so these are at most the lines of three checkpoint intervals.
    """

    def __init__(self, path: Path) -> None:
        """Open for appending; a line that a crash tore is cut off first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with files.naming(path), path.open("ab+") as file:
            file.seek(0)
            self._synced = file.read().rfind(b"\n") + 1
            file.truncate(self._synced)
        self._descriptor = self._open()
        self._lines = bytearray()  # all since the last sync
        self._written = 0  # bytes of these

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record, now or as soon as the disk takes it."""
        self._lines += files.strict_json(record).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._write_out()

    def _write_out(self) -> None:
        while self._written < len(self._lines):
            self._written += os.write(self._descriptor, self._lines[self._written :])

    def sync(self) -> None:
        """Wait until every line is on disk.

        Raises:
            OSError: names the file; no line is lost, the next call tries again.
        """
        try:
            with files.naming(self._path):
                self._write_out()
                os.fsync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                self._begin_again()
            raise
        self._synced += len(self._lines)
        self._lines, self._written = bytearray(), 0

    def _begin_again(self) -> None:
        """Write the lines since the last sync anew: a failed fsync does not say which are lost."""
        descriptor = self._open()  # the old one may be stale
        os.close(self._descriptor)
        self._descriptor = descriptor
        os.ftruncate(descriptor, self._synced)
        self._written = 0
        self._write_out()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """Every valid line of a JSON Lines file; none where there is no file. See `read_counted`."""
    return read_counted(path)[0]


def read_counted(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Every valid line of a JSON Lines file, and how many of its lines are not.

    A line is valid if it is a JSON object with a step, and in metrics.jsonl and validation.jsonl
    with what readers need. A last line without an end was torn by a crash and is not counted.
    """
    try:
        lines = files.retried(path.read_bytes).split(b"\n")[:-1]
    except FileNotFoundError:
        return [], 0
    records = [parsed(line, path.name) for line in lines]
    valid = [record for record in records if record is not None]
    return valid, len(lines) - len(valid)


def parsed(line: bytes, name: str) -> dict[str, Any] | None:
    """The record of a line of the file `name`; `None` where it is not valid."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return record if record.keys() >= NEEDED.get(name, frozenset()) else None


def left_out(run: Path) -> str:
    """Say how many lines of a run's measurements are not valid; "" where all are."""
    words = [
        f"{run / name}: {count} lines are not valid and are left out"
        for name in (METRICS, VALIDATION)
        if (count := read_counted(run / name)[1])
    ]
    return "; ".join(words)


def surviving(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the lineage that counts: a step done again replaces all from it on."""
    result: list[dict[str, Any]] = []
    for record in records:
        while result and result[-1]["step"] >= record["step"]:
            result.pop()
        result.append(record)
    return result


def surviving_validation(
    validation: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The lines of validation.jsonl that belong to the lineage that counts.

    A measurement after `s` updates does not count once a later attempt has done step `s - 1` again,
    even if that attempt has not measured yet.

    Args:
        validation: every line of validation.jsonl.
        lines: of metrics.jsonl, of the surviving steps.
    """
    attempts = {line["step"]: line["attempt"] for line in lines}
    return [
        line
        for line in surviving(validation)
        if attempts.get(line["step"] - 1, line["attempt"]) <= line["attempt"]
    ]


class MetricsWriter:
    """Observer that keeps each step's record with its attempt's number."""

    def __init__(self, run: Path, attempt: int) -> None:
        """Append to the run's metrics.jsonl."""
        self._lines = JsonLines(run / METRICS)
        self._attempt = attempt

    def __call__(self, record: StepRecord) -> None:
        """Write one finished step."""
        line = {"attempt": self._attempt, **dataclasses.asdict(record)}
        line["blocks"] = line.pop("batch_digest")
        if not record.terms:
            del line["terms"]
        self._lines.write(line)

    def sync(self) -> None:
        """Wait until every step's line is on disk.

        Raises:
            OSError: names the file.
        """
        self._lines.sync()


class _Writer(Protocol):
    """What is used of torch's SummaryWriter."""

    file_writer: Any

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...
    def flush(self) -> None: ...


class TensorBoard:
    """Observer that writes TensorBoard scalars: a run an attempt, and a stitched one.

    The stitched run shows the surviving steps alone: what an attempt does again replaces what was
    there (TensorBoard's purge step). Its texts tell of rollbacks and spikes. Curves must not end a
    run: after an error nothing is written until `open` is called again.
    """

    def __init__(
        self,
        folder: Path,
        attempt: int,
        first_step: int,
        warn: Callable[[str], object] = lambda text: sys.stderr.write(f"{text}\n"),
    ) -> None:
        """Open event files below `folder` for an attempt that begins at `first_step`."""
        self._folder, self._attempt, self._warn = folder, attempt, warn
        self._writers: list[_Writer] = []
        self._failed = False
        self.open(first_step)

    def open(self, first_step: int) -> None:
        """Open event files for the steps from `first_step` on, where none are open."""
        if self._writers:
            return
        from torch.utils.tensorboard.writer import SummaryWriter

        def create() -> None:
            mine = str(self._folder / f"attempt-{self._attempt:03d}")
            self._writers.append(SummaryWriter(mine))
            stitched = str(self._folder / "stitched")
            self._writers.append(SummaryWriter(stitched, purge_step=first_step))

        self._try(create)

    def _try(self, write: Callable[[], None]) -> None:
        """Call `write`; close the event files where it fails."""
        try:
            write()
        except Exception as error:  # TensorFlow's, where that is installed, are not OSErrors
            if not self._failed:
                self._warn(f"WARNING: {self._folder}: no curves are written for now: {error}")
            self._failed = True
            for writer in self._writers:
                with contextlib.suppress(Exception):
                    writer.file_writer.close()  # ends its thread, though it cannot write the rest
            self._writers = []

    def _each(self, write: Callable[[_Writer], None]) -> None:
        """Call `write` with each writer, and flush them."""

        def all_of_them() -> None:
            for writer in self._writers:
                write(writer)
                writer.flush()

        self._try(all_of_them)

    def __call__(self, record: StepRecord) -> None:
        """Write one finished step."""
        norm = record.gradient_norm
        self.scalars(
            record.step,
            {
                "train/loss": record.loss,
                **{f"train/loss/{n}": finite_or_nan(t.loss) for n, t in record.terms.items()},
                "optimizer/gradient_norm": math.nan if norm is None else norm,
                "optimizer/loss_scale": record.loss_scale,
                "optimizer/learning_rate": record.learning_rate,
                "speed/tokens_per_second": record.tokens_per_second,
                "data/epoch": record.epoch,
            },
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write named numbers of a step."""

        def write(writer: _Writer) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._each(write)

    def text(self, step: int, words: str) -> None:
        """Write down what happened at a step."""
        self._each(lambda writer: writer.add_text("events", words, step))


class ProgressPrinter:
    """Observer that prints a line now and then."""

    def __init__(
        self,
        last_step: int,
        seconds: float = 10.0,
        write: Callable[[str], object] = lambda text: sys.stdout.write(text),
    ) -> None:
        """Print at most every `seconds`, and after the last step."""
        self._last_step, self._seconds, self._write = last_step, seconds, write
        self._next, self._recent = 0.0, deque[dict[str, Any]](maxlen=RECENT)

    def __call__(self, record: StepRecord) -> None:
        """Print the step if it is time."""
        self._recent.append(dataclasses.asdict(record))
        now = time.monotonic()
        if now < self._next and record.step + 1 != self._last_step:
            return
        self._next = now + self._seconds
        with contextlib.suppress(OSError):  # its log may be on a full disk; another line follows
            self._write(progress_line(self._recent, self._last_step) + "\n")
            sys.stdout.flush()


def progress_line(records: Sequence[Mapping[str, Any]], last_step: int) -> str:
    """Describe the newest step and the time left.

    Args:
        records: lines of metrics.jsonl, at least one; the last one is described. The time left is
            the median duration of the last RECENT of them, times the number of steps left.
        last_step: updates of the whole run.
    """
    record, done = records[-1], records[-1]["step"] + 1
    speed = record["tokens"] / record["seconds"]
    recent = [records[place]["seconds"] for place in range(-min(len(records), RECENT), 0)]
    left = (last_step - done) * statistics.median(recent)
    return (
        f"step {done:>{len(str(last_step))}}/{last_step}  "
        f"loss {figure(record['loss'], '.4f')}  "
        f"gradient norm {figure(record['gradient_norm'], '.2f')}  "
        f"lr {record['learning_rate']:.2e}  "
        f"{speed:,.0f} tokens/s  {duration(left)} left"
    )


def loss_of(line: Mapping[str, Any]) -> float:
    """The loss of a line of metrics.jsonl or validation.jsonl; NaN where it was not finite."""
    return finite_or_nan(line["loss"])


def finite_or_nan(value: float | None) -> float:
    """A number as the files of a run keep it: null, read as NaN, where it was not finite."""
    return float(value) if value is not None and math.isfinite(value) else math.nan


def figure(value: float | None, form: str) -> str:
    """A number in words; null in a JSON file stands for one that is not finite."""
    return format(value, form) if value is not None and math.isfinite(value) else "not finite"


def count(number: int, noun: str) -> str:
    """A number of things: `1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
