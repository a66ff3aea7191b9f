"""Recorded loss curves: CSV, JSON Lines (our metrics.jsonl and others'), TensorBoard. No torch.

One rule for all: records come in the order in which they were logged, and a step at or below one
before it starts over from there, as after a restart from a checkpoint: the later record counts.
Steps may be missing (many logs have every fifth). What is left out or replaced is noted; what
cannot be read is refused, with file and line.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.run.metrics import METRICS, VALIDATION
from pretrain.spikes.detector import Observation

_STEP = ("step", "iteration", "iter", "global_step", "_step", "update", "num_updates")
_LOSS = ("loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "value")
_NORM = ("gradient_norm", "grad_norm", "gnorm", "train_grad_norm", "optimizer_gradient_norm")
_SCALE = ("loss_scale",)
_SKIPPED = ("skipped",)
_EXHAUSTED = ("scale_exhausted",)
_FIELDS = {
    "step": _STEP,
    "loss": _LOSS,
    "norm": _NORM,
    "scale": _SCALE,
    "skipped": _SKIPPED,
    "exhausted": _EXHAUSTED,
}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Curve:
    """What was recorded of a run."""

    name: str
    observations: tuple[Observation, ...]
    """By rising steps."""
    notes: tuple[str, ...] = ()
    """What was left out or replaced on reading, in words."""


def read_all(
    paths: Sequence[Path], tag: str = "train/loss", every_attempt: bool = False
) -> list[Curve]:
    """The curves of several files or folders, under names of their own; see `read`.

    Raises:
        ValueError: as `read`; or there is none, or the same one twice.
    """
    if not paths:
        raise ValueError("no curve is named; give a CSV, a JSON Lines file or a run's folder")
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise ValueError(f"{twice[0]}: is named twice")
    result = []
    plain = [_name(path) for path in paths]
    for path, name in zip(paths, plain, strict=True):
        # Files of one name are told apart by where they lie.
        unique = name if plain.count(name) == 1 else str(path)
        for curve in read(path, tag, every_attempt):
            result.append(dataclasses.replace(curve, name=unique + curve.name[len(name) :]))
    return result


def _name(path: Path) -> str:
    return path.resolve().name if path.is_dir() else path.stem


def read(path: Path, tag: str = "train/loss", every_attempt: bool = False) -> list[Curve]:
    """The curves of a file or a folder.

    Args:
        path: a CSV, a JSON Lines file, a TensorBoard event file or a folder of them, or the folder
            of one of our runs.
        tag: of the loss, in TensorBoard's files.
        every_attempt: one curve for each stretch between restarts, with what it grew from, in place
            of the lineage that survived.

    Raises:
        ValueError: there is nothing to read, a line is not what it should be, or there is no loss.
    """
    rows, notes = _rows(path, tag)
    if not rows:
        raise ValueError(f"{path}: holds no record with a step and a loss")
    validation = path / VALIDATION
    evaluations = _read_json_lines(validation)[0] if validation.is_file() else []
    name = _name(path)
    stretches = _stretches(rows)
    if every_attempt:
        return [
            Curve(f"{name}#{number}", _observations(stretches[:number], evaluations), tuple(notes))
            for number in range(1, len(stretches) + 1)
        ]
    if len(stretches) > 1:
        notes.append(
            f"starts over {len(stretches) - 1} times, first at step {stretches[1][0]['step']}: "
            "the later records count"
        )
    return [Curve(name, _observations(stretches, evaluations), tuple(notes))]


def _rows(path: Path, tag: str) -> tuple[list[Row], list[str]]:
    """Records as they were logged, and notes."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if (path / METRICS).is_file():
        return _read_json_lines(path / METRICS)
    if path.is_dir() or "tfevents" in path.name:
        return _read_tensorboard(path, tag), []
    if path.suffix in (".jsonl", ".json"):
        return _read_json_lines(path)
    return _read_csv(path)


def _stretches(rows: Sequence[Row]) -> list[list[Row]]:
    """Records between restarts."""
    result: list[list[Row]] = []
    for row in rows:
        if not result or row["step"] <= result[-1][-1]["step"]:
            result.append([])
        result[-1].append(row)
    return result


def _observations(
    stretches: Sequence[Sequence[Row]], evaluations: Sequence[Row]
) -> tuple[Observation, ...]:
    """The lineage that survives the restarts, with the evaluations that preceded its steps."""
    kept: list[Row] = []
    for stretch in stretches:
        while kept and kept[-1]["step"] >= stretch[0]["step"]:
            kept.pop()
        kept.extend(stretch)
    # An evaluation after n updates is seen with step n, as live. The last of each step counts.
    before = {row["step"]: row["loss"] for row in evaluations}
    return tuple(
        Observation(
            step=row["step"],
            loss=row["loss"],
            gradient_norm=_norm(row),
            loss_scale=row.get("scale", 1.0),
            skipped=bool(row.get("skipped", 0.0)),
            scale_exhausted=bool(row.get("exhausted", 0.0)),
            validation_loss=before.get(row["step"]),
        )
        for row in kept
    )


def _norm(row: Row) -> float | None:
    """A gradient norm that is not finite counts where it is known if the update was made."""
    norm: float | None = row.get("norm")
    return None if norm is None or not (math.isfinite(norm) or "skipped" in row) else norm


def _columns(names: Sequence[str]) -> dict[str, str]:
    """Which of the names holds which field, by the usual names."""
    plain = {name.strip().lower().translate(_SEPARATORS): name for name in reversed(names)}
    found = {}
    for field, aliases in _FIELDS.items():
        name = next((plain[alias] for alias in aliases if alias in plain), None)
        if name is not None:
            found[field] = name
    return found


_SEPARATORS = str.maketrans({" ": "_", "-": "_", "/": "_", ".": "_"})


def _read_csv(path: Path) -> tuple[list[Row], list[str]]:
    text = path.read_text(encoding="utf-8-sig")
    lines = list(csv.reader(text.splitlines()))
    if not lines:
        raise ValueError(f"{path}: is empty; a curve has a line of names and lines of numbers")
    header, torn = lines[0], 0
    columns = _columns(header)
    for field, words in (("step", "step or iteration"), ("loss", "loss, lm_loss or train/loss")):
        if field not in columns:
            raise ValueError(f"{path}: has no column {words}, only {', '.join(header)}")
    if len(lines[-1]) != len(header) and not text.endswith("\n"):
        torn = len(lines)
        lines.pop()
    for number, line in enumerate(lines, start=1):
        if len(line) not in (0, len(header)):
            raise ValueError(
                f"{path}: line {number} has {len(line)} columns where the first has {len(header)}"
            )
    records = [dict(zip(header, line, strict=False)) for line in lines[1:]]
    fields = [{f: record.get(c) for f, c in columns.items()} for record in records]
    return _numbers(path, fields, first_line=2, torn=torn)


def _read_json_lines(path: Path) -> tuple[list[Row], list[str]]:
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"{path}: is empty; a curve has a JSON object a line")
    *lines, rest = data.split(b"\n")
    fields: list[Mapping[str, Any]] = []
    is_ours = path.name in (METRICS, VALIDATION)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) and is_ours:
            record = {}  # left out with a note, as every reader of our own files does
        if not isinstance(record, dict):
            raise ValueError(f"{path}: line {number} is not a JSON object")
        found = {f: record[c] for f, c in _columns(list(record)).items()}
        if is_ours:  # where null stands for a number that is not finite
            nulls = [f for f in ("loss", "norm") if f in found and found[f] is None]
            found |= dict.fromkeys(nulls, math.nan)
        fields.append(found)
    return _numbers(path, fields, first_line=1, torn=len(lines) + 1 if rest else 0)


def _numbers(
    path: Path, fields: Sequence[Mapping[str, Any]], first_line: int, torn: int
) -> tuple[list[Row], list[str]]:
    """The records that have a step and a loss, and notes on the others.

    Args:
        path: for messages.
        fields: of each line.
        first_line: the number of the first one's.
        torn: the number of a last line that was cut off; 0 where there is none.
    """
    rows = [
        _row(record, f"{path}: line {number}")
        for number, record in enumerate(fields, start=first_line)
        if record.get("step") not in (None, "") and record.get("loss") not in (None, "")
    ]
    notes = [f"line {torn} was cut off and is left out"] if torn else []
    if len(rows) < len(fields):
        notes.append(f"{len(fields) - len(rows)} lines without a step or a loss are left out")
    return rows, notes


def _row(fields: Mapping[str, Any], where: str) -> Row:
    """A record's numbers."""
    row: Row = {}
    for name, value in fields.items():
        if value in (None, ""):
            continue
        try:
            row[name] = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{where}: {name} {value!r} is no number") from None
    step = row["step"]
    if not (math.isfinite(step) and step == int(step)):
        raise ValueError(f"{where}: step {fields['step']!r} is no whole number")
    row["step"] = int(step)
    return row


def _read_tensorboard(path: Path, tag: str) -> list[Row]:
    from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
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
    norms = next((name for name in known if name.translate(_SEPARATORS) in _NORM), None)
    by_step = {event.step: event.value for event in events.Scalars(norms)} if norms else {}
    return [
        {"step": event.step, "loss": event.value}
        | ({"norm": by_step[event.step]} if event.step in by_step else {})
        for event in events.Scalars(tag)
    ]
