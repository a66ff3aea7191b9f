"""metrics.jsonl and validation.jsonl: what a run measured.

metrics.jsonl has a line for each step, in the order in which the steps were done: after a rollback
the steps repeat under a higher attempt number. `surviving` selects the lineage that counts.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from data_prep.common import files
from data_prep.common.wording import duration
from pretrain.loop.protocols import StepRecord

Line = Mapping[str, Any]
"""A line of metrics.jsonl or validation.jsonl."""
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
"""The keys that readers of these files rely on."""
_NEWEST_BYTES = 1 << 17
"""Some hundred lines."""
_RENEW_SECONDS = 0.5
_ERASE_LINE = "\r\x1b[K"
RECENT = 50
"""The time left is estimated from the median duration of this many steps."""


class JsonLines:
    """A file to which records are appended, one JSON line each; not finite numbers become null."""

    def __init__(self, path: Path) -> None:
        """Open for appending, after cutting off a line that a crash left incomplete.

        Raises:
            ValueError: the file is a symbolic link.
        """
        files.check_not_link(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with files.naming(path):
            with path.open("ab+") as file:
                end = file.tell()
                for start in (max(0, end - _NEWEST_BYTES), 0):  # the file may be large
                    file.seek(start)
                    whole = file.read().rfind(b"\n") + 1
                    if whole:
                        break
                file.truncate(start + whole)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record.

        Raises:
            OSError: names the file, whose last line may be incomplete now.
        """
        line = files.strict_json(record).encode() + b"\n"
        with files.naming(self._path):
            while line:  # a nearly full disk takes a part and refuses the rest
                line = line[os.write(self._descriptor, line) :]

    def sync(self) -> None:
        """Wait until every line is on disk.

        Raises:
            OSError: names the file.
        """
        with files.naming(self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_metrics(
    path: Path, tell: Callable[[str], object] = lambda text: None
) -> list[dict[str, Any]]:
    """Return the valid lines of a JSON Lines file; none if it does not exist. See `parse_line`.

    Args:
        path: the file.
        tell: called if other lines are left out. An incomplete last one was left by a crash and
            does not count.
    """
    try:
        lines = files.retried(path.read_bytes).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    valid = [record for line in lines if (record := parse_line(line, path.name)) is not None]
    if invalid := len(lines) - len(valid):
        tell(f"{path}: {invalid} lines are not valid and are left out")
    return valid


def newest_lines(path: Path) -> list[dict[str, Any]]:
    """Return the valid ones of the last lines of a JSON Lines file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.seek(max(0, path.stat().st_size - _NEWEST_BYTES))
            first, *lines = file.read().split(b"\n")[:-1] or [b""]
    except OSError:
        return []
    whole = lines if start else [first, *lines]
    return [record for line in whole if (record := parse_line(line, path.name)) is not None]


def parse_line(line: bytes, name: str) -> dict[str, Any] | None:
    """Return the record in a line of the file `name`, or None if the line is not valid.

    A valid line is a JSON object with a step, and in metrics.jsonl and validation.jsonl with the
    keys in NEEDED.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return record if record.keys() >= NEEDED.get(name, frozenset()) else None


def surviving(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of the surviving lineage: a repeated step replaces all from it on.

    Evaluations after the same step stand beside each other if they measured different things.
    """
    result: list[dict[str, Any]] = []
    for record in records:
        step, measure = record["step"], record.get("measure")
        while result and (
            result[-1]["step"] > step
            or (result[-1]["step"] == step and result[-1].get("measure") == measure)
        ):
            result.pop()
        result.append(record)
    return result


def surviving_validation(
    validation: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the lines of validation.jsonl that belong to the surviving lineage.

    A measurement after `s` updates no longer counts once a later attempt has repeated step `s - 1`,
    even if that attempt has not measured yet.

    Args:
        validation: every line of validation.jsonl.
        lines: the lines of metrics.jsonl for the surviving steps.
    """
    attempts = {line["step"]: line["attempt"] for line in lines}
    return [
        line
        for line in surviving(validation)
        if attempts.get(line["step"] - 1, line["attempt"]) <= line["attempt"]
    ]


def line_of(record: StepRecord) -> dict[str, Any]:
    """The line of metrics.jsonl for a finished step, without its attempt."""
    result = record.result
    line = {"step": record.step, **vars(result), **vars(record), "blocks": record.batch_digest}
    line["terms"] = {name: vars(term) for name, term in result.terms.items()}
    absent = {"result", "batch_digest", "measured", "figures"}
    absent |= set() if result.terms else {"terms"}
    known = {name: value for name, value in line.items() if name not in absent}
    return {**known, **record.figures}


class MetricsWriter:
    """Observer that writes each step's record to metrics.jsonl with the attempt's number."""

    def __init__(self, run: Path, attempt: int) -> None:
        """Append to the run's metrics.jsonl."""
        self._lines = JsonLines(run / METRICS)
        self._attempt = attempt
        self.sync = self._lines.sync

    def __call__(self, record: StepRecord) -> None:
        """Write one finished step."""
        self._lines.write({"attempt": self._attempt, **line_of(record)})


class ProgressPrinter:
    """Shows where a run is: a line that is renewed on a terminal, else one now and then.

    It is an observer of steps, or is given lines of metrics.jsonl (`show`).
    """

    def __init__(
        self,
        last_step: int,
        seconds: float = 10.0,
        write: Callable[[str], object] = lambda text: sys.stdout.write(text),
        prefix: str = "",
        renews: bool = False,
    ) -> None:
        """Show nothing yet.

        Args:
            last_step: updates of the whole run. Its line is always shown, and stays.
            seconds: between two lines where they are not renewed.
            write: receives text.
            prefix: of each line.
            renews: whether the text goes to a terminal, where one line is renewed.
        """
        self._last_step, self._write, self._prefix = last_step, write, prefix
        self._renews, self._seconds = renews, min(seconds, _RENEW_SECONDS) if renews else seconds
        self._next, self._recent = 0.0, deque[Line](maxlen=RECENT)
        self._newest: Line | None = None
        self._shown = False
        """Whether the cursor is at the end of a line that is to be renewed."""

    def __call__(self, record: StepRecord) -> None:
        """Show a finished step if it is time."""
        self._recent.append(line_of(record))
        self.show(self._recent)
        sys.stdout.flush()

    def show(self, lines: Sequence[Line]) -> None:
        """Show the newest of some lines if it is time and it was not shown before."""
        now, newest = time.monotonic(), lines[-1]
        is_last = newest["step"] + 1 == self._last_step
        if newest == self._newest or (now < self._next and not is_last):
            return
        self._next, self._newest = now + self._seconds, newest
        end = clock_time(seconds_left(lines, self._last_step))
        text = f"{self._prefix}{progress_line(lines, self._last_step)}  ends {end}"
        if not self._renews:
            self._write(text + "\n")
            return
        columns = shutil.get_terminal_size().columns
        self._write(f"{_ERASE_LINE}{text[: columns - 1]}")  # the cursor needs a place, too
        self._shown = True
        if is_last:
            self.leave()

    def leave(self) -> None:
        """Leave a line that is to be renewed as it is: what is written next begins a new one."""
        if self._shown:
            self._shown = False
            self._write("\n")


def progress_line(records: Sequence[Line], last_step: int) -> str:
    """Describe the newest step and the time left.

    Args:
        records: lines of metrics.jsonl, at least one; the last one is described. The time left is
            the median duration of the last RECENT of them, times the number of steps left.
        last_step: updates of the whole run.
    """
    record, done = records[-1], records[-1]["step"] + 1
    speed = record["tokens"] / record["seconds"]
    return (
        f"step {done:>{len(str(last_step))}}/{last_step}  "
        f"loss {format_number(record['loss'], '.4f')}  "
        f"{duration(seconds_left(records, last_step))} left  "  # a terminal cuts off the end
        f"gradient norm {format_number(record['gradient_norm'], '.2f')}  "
        f"lr {record['learning_rate']:.2e}  "
        f"{speed:,.0f} tokens/s"
    )


def clock_time(seconds: float) -> str:
    """The local time so many seconds from now, with its day unless that is today."""
    now = datetime.datetime.now()
    try:
        end = now + datetime.timedelta(seconds=seconds)
    except OverflowError:
        return "the end of time"
    return end.strftime("%H:%M" if end.date() == now.date() else "%Y-%m-%d %H:%M")


def seconds_left(records: Sequence[Line], last_step: int) -> float:
    """Estimate the time until the last step; see `progress_line`."""
    recent = [records[index]["seconds"] for index in range(-min(len(records), RECENT), 0)]
    left: float = (last_step - records[-1]["step"] - 1) * statistics.median(recent)
    return left


def best_validation(validation: Sequence[Line]) -> Line | None:
    """Return the measurement with the lowest loss among those that are finite.

    Only those count that measured the same as the newest one.
    """
    measures = {line.get("measure") for line in validation[-1:]}
    comparable = [
        line
        for line in validation
        if line.get("measure") in measures and not math.isnan(loss_of(line))
    ]
    return min(comparable, key=loss_of, default=None)


def validation_line(validation: Sequence[Line]) -> str:
    """Describe the newest validation and the best one.

    Of several terms it gives the loss of each, because their sum has no perplexity.

    Args:
        validation: lines of validation.jsonl on the surviving lineage, at least one.
    """
    newest, best = validation[-1], best_validation(validation)
    terms = newest.get("terms", {})
    key, digits = ("loss", ".4f") if terms else ("perplexity", ".2f")
    shown = {name: term[key] for name, term in terms.items()} or {key: newest[key]}
    loss = format_number(newest["loss"], ".4f")
    parts = [f"{name} {format_number(value, digits)}" for name, value in shown.items()]
    text = f"validation after {newest['step']:,} steps: loss {loss}, {', '.join(parts)}"
    if best is None or best is newest:
        return text
    return f"{text} (best {best[key]:{digits}} after {best['step']:,})"


def loss_of(line: Line) -> float:
    """The loss in a line of metrics.jsonl or validation.jsonl; NaN if it was not finite."""
    return finite_or_nan(line["loss"])


def finite_or_nan(value: float | None) -> float:
    """A number from a run's files, where null stands for one that was not finite; NaN for these."""
    return float(value) if value is not None and math.isfinite(value) else math.nan


def format_number(value: float | None, form: str) -> str:
    """Format a number from a run's files, where null stands for one that was not finite."""
    return format(value, form) if math.isfinite(finite_or_nan(value)) else "not finite"


def epochs(number: float) -> str:
    """A number of epochs: with two decimals, or two significant digits of a small one."""
    return f"{number:.2f}" if number >= 1 or not number else f"{number:.2g}"
