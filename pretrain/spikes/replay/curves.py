"""Read recorded loss curves: CSV, JSON Lines (metrics.jsonl and others), TensorBoard.

Records come in the order in which they were logged. A step at or below the one before it starts
over from there, as after a restart from a checkpoint, and the later record counts. Steps may be
missing (many logs have every fifth). Records that are left out or replaced are noted; a file that
cannot be read is refused with its line.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.config.load import RUN_FILE
from pretrain.records import metrics
from pretrain.records.metrics import METRICS, VALIDATION, surviving
from pretrain.spikes.live import evaluations
from pretrain.spikes.observations import Evaluation, Observation, Seen, in_order

_COLUMN_NAMES = {
    "step": ("step", "iteration", "iter", "global_step", "_step", "update", "num_updates"),
    "loss": ("loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "value"),
    "gradient_norm": (
        *("gradient_norm", "grad_norm", "gnorm", "train_grad_norm", "optimizer_gradient_norm"),
    ),
    "loss_scale": ("loss_scale",),
    "skipped": ("skipped",),
    "scale_exhausted": ("scale_exhausted",),
}
"""Fields of Observation, and the names that they have in logs."""
_SEPARATORS = str.maketrans({" ": "_", "-": "_", "/": "_", ".": "_"})

Row = dict[str, Any]
"""Fields of an Observation, and of a run of this package the attempt."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """The recorded measurements of a run."""

    name: str
    observations: tuple[Observation, ...]
    """In order of rising steps."""
    notes: tuple[str, ...] = ()
    """Messages on records that were left out or replaced."""
    evaluations: tuple[Evaluation, ...] = ()
    """Of a run of this package; in the order in which they were done."""
    run: Path | None = None
    """The folder of this run, if it has a recipe."""

    @property
    def seen(self) -> list[Seen]:
        """What a detector would have judged, in order."""
        return in_order(self.observations, self.evaluations)


def read_all(
    paths: Sequence[Path], tag: str = "train/loss", every_attempt: bool = False
) -> list[Curve]:
    """Read the curves of several files or folders, under unique names; see `read_curves`.

    Raises:
        ValueError: as `read_curves`; or `paths` is empty, or names a path twice.
    """
    if not paths:
        raise ValueError("no curve is named; give a CSV, a JSON Lines file or a run's folder")
    repeated = [path for path in paths if paths.count(path) > 1]
    if repeated:
        raise ValueError(f"{repeated[0]}: is named twice")
    names = [_name(path) for path in paths]
    return [
        curve
        for path, name in zip(paths, names, strict=True)
        for curve in read_curves(
            path, tag, every_attempt, name if names.count(name) == 1 else str(path)
        )
    ]


def _name(path: Path) -> str:
    return path.resolve().name if path.is_dir() else path.stem


def read_curves(
    path: Path, tag: str = "train/loss", every_attempt: bool = False, name: str = ""
) -> list[Curve]:
    """Read the curves of a file or a folder.

    Args:
        path: a CSV, a JSON Lines file, a TensorBoard event file or a folder of them, or the folder
            of a run of this package.
        tag: tag of the loss in TensorBoard files.
        every_attempt: return one curve for each stretch between restarts, with the records that it
            continues, in place of the surviving lineage.
        name: name of the curve; by default that of the file or folder.

    Raises:
        ValueError: there is nothing to read, a line is malformed, or there is no loss.
    """
    rows, notes = _rows(path, tag)
    if not rows:
        raise ValueError(f"{path}: holds no record with a step and a loss")
    name = name or _name(path)
    validation = metrics.read_metrics(path / VALIDATION) if (path / METRICS).is_file() else []
    run = path if (path / RUN_FILE).is_file() else None
    starts = [n for n in range(1, len(rows)) if rows[n]["step"] <= rows[n - 1]["step"]]
    if starts and not every_attempt:
        notes.append(
            f"starts over {len(starts)} times, first at step {rows[starts[0]]['step']}: "
            "the later records count"
        )
    ends = [*(starts if every_attempt else ()), len(rows)]
    return [
        Curve(
            f"{name}#{number}" if every_attempt else name,
            tuple(
                Observation(**{key: row[key] for key in row.keys() - {"attempt"}}) for row in kept
            ),
            tuple(notes),
            tuple(evaluations(metrics.surviving_validation(known, kept) if known else [])),
            run,
        )
        for number, end in enumerate(ends, start=1)
        for kept in [surviving(rows[:end])]
        for known in [[line for line in validation if not _is_later(line, rows[end:])]]
    ]


def _is_later(line: Row, rows: Sequence[Row]) -> bool:
    """Whether a line of validation.jsonl is of the attempt that these rows begin with, or later."""
    return bool(rows) and line["attempt"] >= rows[0]["attempt"]


def _rows(path: Path, tag: str) -> tuple[list[Row], list[str]]:
    """Records in the order in which they were logged, and notes."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if (path / METRICS).is_file():
        return _read_json_lines(path / METRICS)
    if path.is_dir() or "tfevents" in path.name:
        return _read_tensorboard(path, tag), []
    if path.suffix in (".jsonl", ".json"):
        return _read_json_lines(path)
    return _read_csv(path)


def _columns(names: Sequence[str]) -> dict[str, str]:
    """The column of each field that is there."""
    plain = {name.strip().lower().translate(_SEPARATORS): name for name in reversed(names)}
    return {
        field: next(plain[alias] for alias in aliases if alias in plain)
        for field, aliases in _COLUMN_NAMES.items()
        if not plain.keys().isdisjoint(aliases)
    }


def _read_csv(path: Path) -> tuple[list[Row], list[str]]:
    text = path.read_text(encoding="utf-8-sig")
    lines = list(csv.reader(text.splitlines()))
    if not lines:
        raise ValueError(f"{path}: is empty; a curve has a line of names and lines of numbers")
    header, torn = lines[0], 0
    columns = _columns(header)
    for field, names in (("step", "step or iteration"), ("loss", "loss, lm_loss or train/loss")):
        if field not in columns:
            raise ValueError(f"{path}: has no column {names}, only {', '.join(header)}")
    if len(lines[-1]) != len(header) and not text.endswith("\n"):
        torn = len(lines)
        lines.pop()
    for number, line in enumerate(lines, start=1):
        if len(line) not in (0, len(header)):
            raise ValueError(
                f"{path}: line {number} has {len(line)} columns where the first has {len(header)}"
            )
    records = [dict(zip(header, line, strict=False)) for line in lines[1:]]
    return _numbers(path, records, first_line=2, torn=torn)


def _read_json_lines(path: Path) -> tuple[list[Row], list[str]]:
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"{path}: is empty; a curve has a JSON object per line")
    *lines, rest = data.split(b"\n")
    records: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) and path.name != METRICS:
            raise ValueError(f"{path}: line {number} is not a JSON object")
        # In our own file such a line is left out with a note, as by their other readers.
        records.append(record if isinstance(record, dict) else {})
    return _numbers(path, records, first_line=1, torn=len(lines) + 1 if rest else 0)


def _numbers(
    path: Path, records: Sequence[Mapping[str, Any]], first_line: int, torn: int
) -> tuple[list[Row], list[str]]:
    """The records that have a step and a loss, and notes on the others.

    Args:
        path: the file.
        records: the columns of each line.
        first_line: number of the first line.
        torn: number of a last line that was cut off; 0 if there is none.
    """
    rows = []
    for number, record in enumerate(records, start=first_line):
        fields = {field: record[column] for field, column in _columns(list(record)).items()}
        if path.name == METRICS:  # null stands for a number that is not finite
            fields |= {f: math.nan for f in ("loss", "gradient_norm") if fields.get(f, 0) is None}
        if fields.get("step") not in (None, "") and fields.get("loss") not in (None, ""):
            rows.append(_row(fields, f"{path}: line {number}"))
            if path.name == METRICS:
                rows[-1]["attempt"] = record.get("attempt", 0)
    notes = [f"line {torn} was cut off and is left out"] if torn else []
    if len(rows) < len(records):
        notes.append(f"{len(records) - len(rows)} lines without a step or a loss are left out")
    return rows, notes


def _row(fields: Mapping[str, Any], where: str) -> Row:
    """Convert a record's fields to numbers."""
    row: Row = {}
    for name, value in fields.items():
        if value in (None, ""):
            continue
        try:
            row[name] = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{where}: {name} {value!r} is not a number") from None
    step = row["step"]
    if not (math.isfinite(step) and step == int(step)):
        raise ValueError(f"{where}: step {fields['step']!r} is not a whole number")
    # Without a record of skips, fp16 may have skipped an update whose norm is not finite.
    if "skipped" not in row and not math.isfinite(row.get("gradient_norm", 0.0)):
        del row["gradient_norm"]
    row |= {name: bool(row[name]) for name in ("skipped", "scale_exhausted") if name in row}
    return row | {"step": int(step)}


def _read_tensorboard(path: Path, tag: str) -> list[Row]:
    from tensorboard.backend.event_processing import (
        event_accumulator,
    )

    events = event_accumulator.EventAccumulator(
        str(path), size_guidance={"scalars": 0}, purge_orphaned_data=False
    )
    events.Reload()
    known = events.Tags()["scalars"]
    if tag not in known:
        names = ", ".join(sorted(known)) or "none"
        raise ValueError(f"{path}: has no scalar {tag!r}; name one with --tag: {names}")
    norm_tag = _columns(known).get("gradient_norm")
    norms = {e.step: e.value for e in events.Scalars(norm_tag)} if norm_tag else {}
    return [
        _row({"step": e.step, "loss": e.value, "gradient_norm": norms.get(e.step)}, str(path))
        for e in events.Scalars(tag)
    ]
