"""ledger.jsonl: what happened to a run, append-only and hash-chained. Imports no torch.

Each line is a JSON object with `number`, `time`, `kind`, `previous` (the hash of the line before)
and the kind's own fields. A line that was torn by a crash is the last one and is cut off at the
next append; anything else that does not verify is an error.

While an attempt lives its rank 0 alone appends; the supervisor does so when no rank is left. What
the run is to do next follows from the ledger alone: see `fold`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.order import Lineage, Segment

Record = dict[str, Any]
FILE_NAME = "ledger.jsonl"
_START = "0" * 32


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=16).hexdigest()


def read(path: Path) -> list[Record]:
    """Every record of a ledger, oldest first; a torn last line is left out.

    Raises:
        ValueError: a line does not follow from the one before it.
    """
    records, _ = _read(path)
    return records


def _read(path: Path) -> tuple[list[Record], int]:
    """Records, and how many bytes of the file hold them."""
    data = path.read_bytes() if path.exists() else b""
    records: list[Record] = []
    previous, offset = _START, 0
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            sound = record["previous"] == previous and record["number"] == len(records)
        except (ValueError, TypeError, KeyError):
            sound = False
        if not sound:
            raise ValueError(
                f"{path}: line {len(records) + 1} does not follow from the line before it; the "
                "ledger was changed by something other than zeroclap"
            )
        records.append(record)
        previous, offset = _digest(line), offset + len(line)
    return records, offset


def append(path: Path, kind: str, **fields: object) -> Record:
    """Add a record and wait until it is on disk."""
    records, size = _read(path)
    previous = _START
    if records:
        with path.open("rb") as file:
            previous = _digest(file.read(size).splitlines(keepends=True)[-1])
    record: Record = {
        "number": len(records),
        "time": round(time.time(), 3),
        "kind": kind,
        **fields,
        "previous": previous,
    }
    line = json.dumps(record).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, size, os.SEEK_SET)
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return record


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where a run stands, as its ledger tells."""

    attempts: int
    """Attempts begun."""
    segments: tuple[tuple[int, int], ...]
    """(first step, seed) of the lineage that survives, oldest first."""
    checkpoints: tuple[int, ...]
    """Steps of the committed checkpoints that lie on it and are kept, oldest first."""
    spikes: tuple[Record, ...]
    """Every confirmed spike."""
    rollbacks: tuple[Record, ...]
    """Every rollback."""
    seeds: frozenset[int]
    """Seeds used so far, on any lineage."""
    last: Record | None
    """The newest record of the newest attempt, `None` before the first."""
    done: bool

    def resume_step(self) -> int:
        """Updates that the newest surviving checkpoint holds; 0 where there is none."""
        return self.checkpoints[-1] if self.checkpoints else 0


def fold(records: Sequence[Record], seed: int) -> RunState:
    """The state that a ledger's records lead to, for a recipe whose seed is `seed`."""
    segments: list[tuple[int, int]] = [(0, seed)]
    checkpoints: list[int] = []
    attempts, done = 0, False
    last: Record | None = None
    for record in records:
        kind = record["kind"]
        last = record
        if kind == "attempt":
            attempts += 1
        elif kind == "commit":
            checkpoints = [step for step in checkpoints if step < record["step"]]
            checkpoints.append(record["step"])
        elif kind in ("delete", "reject"):
            checkpoints = [step for step in checkpoints if step != record["step"]]
        elif kind == "rollback":
            step = record["step"]
            segments = [s for s in segments if s[0] < step] + [(step, record["seed"])]
            checkpoints = [c for c in checkpoints if c <= step]
        elif kind == "done":
            done = True
    rollbacks = tuple(r for r in records if r["kind"] == "rollback")
    return RunState(
        attempts=attempts,
        segments=tuple(segments),
        checkpoints=tuple(checkpoints),
        spikes=tuple(r for r in records if r["kind"] == "spike"),
        rollbacks=rollbacks,
        seeds=frozenset([seed, *(r["seed"] for r in rollbacks)]),
        last=last,
        done=done,
    )


def lineage(segments: Sequence[tuple[int, int]], blocks_per_step: int) -> Lineage:
    """The order's lineage, in places, of (first step, seed) segments."""
    return Lineage(tuple(Segment(step * blocks_per_step, seed) for step, seed in segments))
