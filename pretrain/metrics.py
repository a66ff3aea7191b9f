"""metrics.jsonl, validation.jsonl and TensorBoard: what a run measured. Imports torch only inside.

metrics.jsonl has a line a step, in the order in which steps were done: after a rollback the steps
repeat under a higher attempt number. `surviving` reads the lineage that counts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.loop import StepRecord

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"


class JsonLines:
    """Appends records to a file, a line each, flushed each; a number that is not finite is null."""

    def __init__(self, path: Path) -> None:
        """Open for appending; a line that a crash tore is cut off first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, object]) -> None:
        """Append one record."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a JSON Lines file; none where there is no file.

    Raises:
        ValueError: a line other than a torn last one is no JSON; it is named.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}: line {number} is no JSON") from None
    return records


def surviving(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the lineage that counts: a step done again replaces all from it on."""
    result: list[dict[str, Any]] = []
    for record in records:
        while result and result[-1]["step"] >= record["step"]:
            result.pop()
        result.append(record)
    return result


class MetricsWriter:
    """Observer that keeps each step's record with its attempt's number."""

    def __init__(self, run: Path, attempt: int) -> None:
        """Append to the run's metrics.jsonl."""
        self._lines = JsonLines(run / METRICS)
        self._attempt = attempt

    def __call__(self, record: StepRecord) -> None:
        """Write one finished step."""
        self._lines.write({"attempt": self._attempt, **dataclasses.asdict(record)})


class TensorBoard:
    """Observer that writes TensorBoard scalars: a run an attempt, and a stitched one.

    The stitched run shows the surviving steps alone: what an attempt does again replaces what was
    there (TensorBoard's purge step). Its texts tell of rollbacks and spikes.
    """

    def __init__(self, folder: Path, attempt: int, first_step: int) -> None:
        """Open event files below `folder` for an attempt that begins at `first_step`."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writers = [
            SummaryWriter(str(folder / f"attempt-{attempt:03d}")),
            SummaryWriter(str(folder / "stitched"), purge_step=first_step),
        ]

    def __call__(self, record: StepRecord) -> None:
        """Write one finished step."""
        norm = record.gradient_norm
        self.scalars(
            record.step,
            {
                "train/loss": record.loss,
                "optimizer/gradient_norm": math.nan if norm is None else norm,
                "optimizer/loss_scale": record.loss_scale,
                "optimizer/learning_rate": record.learning_rate,
                "speed/tokens_per_second": record.tokens_per_second,
                "data/epoch": record.epoch,
            },
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write named numbers of a step."""
        for writer in self._writers:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

    def text(self, step: int, words: str) -> None:
        """Write down what happened at a step."""
        for writer in self._writers:
            writer.add_text("events", words, step)
            writer.flush()


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
        self._next = 0.0

    def __call__(self, record: StepRecord) -> None:
        """Print the step if it is time."""
        now = time.monotonic()
        if now < self._next and record.step + 1 != self._last_step:
            return
        self._next = now + self._seconds
        self._write(progress_line(dataclasses.asdict(record), self._last_step) + "\n")
        sys.stdout.flush()


def progress_line(record: dict[str, Any], last_step: int) -> str:
    """One step in words; `record` is a line of metrics.jsonl."""
    speed = record["tokens"] / record["seconds"]
    left = (last_step - record["step"] - 1) * record["seconds"]
    return (
        f"step {record['step']:>{len(str(last_step))}}/{last_step}  "
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
    """A number of a JSON Lines file, in which null stands for one that is not finite."""
    return "not finite" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
