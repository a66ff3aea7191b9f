"""metrics.jsonl and validation.jsonl: what a run measured.

metrics.jsonl has a line for each step, in the order in which the steps were done: after a rollback
the steps repeat under a higher attempt number. `surviving` selects the lineage that counts.
"""

import bisect
import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired

from annotated_types import Ge, Gt, Lt
from typing_extensions import TypedDict

from data_prep.common import files
from data_prep.common.records import decode
from data_prep.common.wording import count
from pretrain.loop.protocols import StepRecord

Line = Mapping[str, Any]
"""A line of metrics.jsonl or validation.jsonl."""
METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
_NEWEST_BYTES = 1 << 17
"""Some hundred lines."""
Count = Annotated[int, Ge(0), Lt(1 << 63)]
Number = float | None
"""None where it was not finite."""


class TermLine(TypedDict):
    """What is read of a term's part of a StepLine."""

    loss: Number


class StepLine(TypedDict):
    """What is read of a line of metrics.jsonl."""

    attempt: Count
    step: Count
    loss: Number
    gradient_norm: Number
    learning_rate: float
    seed: Count
    tokens: Count
    seconds: Annotated[float, Gt(0)]
    loss_scale: float
    skipped: bool
    blocks: str
    scale_exhausted: NotRequired[bool]
    mfu: NotRequired[float]
    computed_mfu: NotRequired[float]
    slowest_rank: NotRequired[Count]
    slowest_rank_seconds: NotRequired[float]
    other_ranks_seconds: NotRequired[float]
    terms: NotRequired[dict[str, TermLine]]


class Score(TypedDict):
    """What is read of a measurement: of all, or of a term, a subset or a corpus."""

    loss: Number
    perplexity: Number
    targets: Count


class EvaluationLine(Score):
    """What is read of a line of validation.jsonl."""

    attempt: Count
    step: Count
    validation_id: NotRequired[str]
    subsets: dict[str, Score]
    terms: NotRequired[dict[str, Score]]
    corpora: NotRequired[dict[str, Score]]


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
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
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


def read_metrics(
    path: Path, tell: Callable[[str], object] = lambda text: None
) -> list[dict[str, Any]]:
    """Return the valid lines of metrics.jsonl or validation.jsonl; none if it does not exist.

    Args:
        path: the file.
        tell: called if other lines are left out. An incomplete last one was left by a crash and
            does not count.
    """
    data = files.read_bytes(path)
    lines, refused = _read(itertools.islice(io.BytesIO(data), data.count(b"\n")), path)
    if refused:
        number = count(len(refused), "line")
        tell(f"{path}: {number} left out as not valid, the first is {refused[0]}")
    return lines


def newest_lines(path: Path) -> list[dict[str, Any]]:
    """Return the valid ones of the last lines of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.seek(max(0, path.stat().st_size - _NEWEST_BYTES))
            lines = file.read().split(b"\n")[bool(start) : -1]  # the first may be cut off
    except OSError:
        return []
    return _read(lines, path)[0]


def _read(lines: Iterable[bytes], path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the valid lines, with the keys of their kind, and why each other one is not."""
    kind: type = EvaluationLine if path.name == VALIDATION else StepLine
    valid, refused = list[dict[str, Any]](), list[str]()
    for number, line in enumerate(lines, start=1):
        try:
            valid.append(decode(kind, line))
        except ValueError as error:
            refused.append(f"line {number}: {error}")
    return valid, refused


def surviving(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of the surviving lineage: a repeated step replaces all from it on.

    Evaluations after the same step stand beside each other if they measured different things.
    """
    result: list[dict[str, Any]] = []
    newest = 0
    for record in records:
        attempt = record.get("attempt", 0)
        if attempt < newest:  # a superseded attempt wrote it before it noticed
            continue
        newest = attempt
        step, validation_id = record["step"], record.get("validation_id")
        while result and (
            result[-1]["step"] > step
            or (result[-1]["step"] == step and result[-1].get("validation_id") == validation_id)
        ):
            result.pop()
        result.append(record)
    return result


def surviving_validation(
    validation: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the lines of validation.jsonl that belong to the surviving lineage.

    A measurement no longer counts once a later attempt has repeated an update before it, even if
    that attempt has not measured yet.

    Args:
        validation: every line of validation.jsonl.
        lines: the lines of metrics.jsonl for the surviving steps.
    """
    steps = [line["step"] for line in lines]
    attempts = [0, *(line["attempt"] for line in lines)]
    return [
        line
        for line in surviving(validation)
        if attempts[bisect.bisect_left(steps, line["step"])] <= line["attempt"]
    ]


def line_of(record: StepRecord, attempt: int = 1) -> dict[str, Any]:
    """The line of metrics.jsonl for a finished step of an attempt."""
    result = record.result
    line = {"attempt": attempt, "step": record.step, **vars(result), **vars(record)}
    line["blocks"] = record.batch_digest
    for name in ("result", "batch_digest", "measured", "figures", "terms"):
        del line[name]
    if result.terms:
        line["terms"] = {name: vars(term) for name, term in result.terms.items()}
    return {**line, **record.figures}


def best_validation(validation: Sequence[Line]) -> Line | None:
    """Return the measurement with the lowest loss among those that are finite.

    Only those count that measured the same as the newest one.
    """
    validation_ids = {line.get("validation_id") for line in validation[-1:]}
    comparable = (line for line in validation if line.get("validation_id") in validation_ids)
    finite = (line for line in comparable if not math.isnan(loss_of(line)))
    return min(finite, key=loss_of, default=None)


def loss_of(line: Line) -> float:
    """The loss in a line of metrics.jsonl or validation.jsonl; NaN if it was not finite."""
    return finite_or_nan(line["loss"])


def finite_or_nan(value: float | None) -> float:
    """A number from a run's files, where null stands for one that was not finite; NaN for these."""
    return float(value) if value is not None and math.isfinite(value) else math.nan
