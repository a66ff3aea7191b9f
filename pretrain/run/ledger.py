"""ledger.jsonl: what happened to a run, append-only and hash-chained. Imports no torch.

Each line is a JSON object with `number`, `time`, `kind`, `previous` (the hash of the line before)
and the kind's own fields. A line that was torn by a crash is the last one and is cut off at the
next append; anything else that does not verify is an error.

While an attempt lives its rank 0 alone appends; the supervisor does so when no rank is left. What
the run is to do next follows from the ledger alone: see `fold`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_prep import files
from data_prep.records import check_format
from pretrain.data.order import Lineage

Record = dict[str, Any]
FILE_NAME = "ledger.jsonl"
FORMAT_VERSION = 1
"""Written into the first record; absent: 1."""
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
    try:
        data = files.retried(path.read_bytes)
    except FileNotFoundError:
        data = b""
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
        if not records:
            check_format(record.get("format_version", 1), FORMAT_VERSION, path)
        records.append(record)
        previous, offset = _digest(line), offset + len(line)
    return records, offset


def append(path: Path, kind: str, **fields: object) -> Record:
    """Add a record and wait until it is on disk; returns it as it will be read.

    Raises:
        OSError: names the file; the record was not added.
    """
    records, size = _read(path)
    previous = _START
    if records:
        with path.open("rb") as file:
            previous = _digest(file.read(size).splitlines(keepends=True)[-1])
    if not records:
        fields = {"format_version": FORMAT_VERSION, **fields}
    record: Record = {
        "number": len(records),
        "time": round(time.time(), 3),
        "kind": kind,
        **fields,
        "previous": previous,
    }
    line = files.strict_json(record).encode() + b"\n"
    with files.naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if not records:
                files.fsync_folder(path.parent)
            _write_at(descriptor, size, line)
        finally:
            os.close(descriptor)
    written: Record = json.loads(line)
    return written


def _write_at(descriptor: int, size: int, line: bytes) -> None:
    """Make `line` follow the file's first `size` bytes, or leave the file with these alone."""
    try:
        os.ftruncate(descriptor, size)
        written = 0
        while written < len(line):  # a nearly full disk takes a part, and refuses the rest
            written += os.pwrite(descriptor, line[written:], size + written)
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where a run stands, as its ledger tells."""

    seed: int
    """Of the recipe."""
    attempts: int
    """Attempts begun."""
    next_attempt: int
    """Number of the next launch: above that of every launch so far, begun or not."""
    segments: tuple[tuple[int, int], ...]
    """(first step, seed) of the lineage that survives, oldest first."""
    lowered: tuple[tuple[int, int, float], ...]
    """(first step, end step, factor) where a rollback lowered the learning rate; may overlap."""
    checkpoints: tuple[int, ...]
    """Steps of the committed checkpoints that lie on it and are kept, oldest first."""
    spikes: tuple[Record, ...]
    """Every confirmed spike."""
    rollbacks: tuple[Record, ...]
    """Every rollback."""
    suspected: tuple[int, ...]
    """Onsets of the suspicions and spikes that are open: they have not healed, and no rollback or
    resume went back to before they were said."""
    last: Record | None
    """The newest record, `None` before the first."""
    done: bool

    @property
    def seeds(self) -> frozenset[int]:
        """Seeds used so far, on any lineage."""
        return frozenset([self.seed, *(record["seed"] for record in self.rollbacks)])

    @property
    def unanswered_spike(self) -> Record | None:
        """The newest spike, if no rollback has followed it."""
        answered = self.rollbacks[-1]["number"] if self.rollbacks else -1
        newest = self.spikes[-1] if self.spikes else None
        return newest if newest and newest["number"] > answered else None

    @property
    def suspected_since(self) -> int | None:
        """The earliest of the onsets under suspicion."""
        return min(self.suspected, default=None)

    @property
    def tainted(self) -> tuple[int, ...]:
        """Steps of the checkpoints that were saved after an onset under suspicion."""
        onset = self.suspected_since
        return () if onset is None else tuple(step for step in self.checkpoints if step > onset)

    def resume_step(self) -> int:
        """Updates that the newest surviving checkpoint holds; 0 where there is none."""
        return self.checkpoints[-1] if self.checkpoints else 0

    def learning_rate_factor(self, step: int) -> float:
        """What the schedule's learning rate is multiplied by in a step."""
        return math.prod(factor for first, end, factor in self.lowered if first <= step < end)

    def lineage(self, total: int, first_block: Callable[[int], int]) -> Lineage:
        """The order of blocks that the rollbacks lead to.

        Args:
            total: blocks of an epoch.
            first_block: place of a step's first block, counted over all epochs.
        """
        lineage = Lineage.begin(total, self.seed)
        for record in self.rollbacks:
            skip = record.get("skip")
            places = (first_block(skip[0]), first_block(skip[1])) if skip else None
            lineage = lineage.rolled_back(first_block(record["step"]), record["seed"], places)
        return lineage


def lineage_record(lineage: Lineage, end_place: int | None = None) -> list[list[int | str]]:
    """A lineage as ledger and manifests keep it: what identifies each segment.

    Args:
        lineage: of a run.
        end_place: leaves out the segments that begin at this place or after it.
    """
    return [
        list(segment.identity)
        for segment in lineage.segments
        if end_place is None or segment.first_position < end_place
    ]


def fold(records: Sequence[Record], seed: int) -> RunState:
    """The state that a ledger's records lead to, for a recipe whose seed is `seed`."""
    told = _Telling(seed)
    for record in records:
        told.take(record)
    return RunState(
        seed=seed,
        attempts=told.attempts,
        next_attempt=1 + max((r["attempt"] for r in records if "attempt" in r), default=0),
        segments=tuple(told.segments),
        lowered=tuple(told.lowered),
        checkpoints=tuple(told.checkpoints),
        spikes=tuple(r for r in records if r["kind"] == "spike"),
        rollbacks=tuple(r for r in records if r["kind"] == "rollback"),
        suspected=tuple(told.suspected.values()),
        last=records[-1] if records else None,
        done=told.done,
    )


class _Telling:
    """What changes as records are told one by one; other kinds than those named change nothing."""

    def __init__(self, seed: int) -> None:
        self.attempts, self.done = 0, False
        self.segments: list[tuple[int, int]] = [(0, seed)]
        self.lowered: list[tuple[int, int, float]] = []
        self.checkpoints: list[int] = []
        self.suspected: dict[str, int] = {}  # onset by channel
        self.said: list[Record] = []  # of suspicions, on the lineage that survives
        self._changes: dict[str, Callable[[Record], None]] = {
            "attempt": self._begin,
            "commit": self._commit,
            "delete": self._remove,
            "reject": self._remove,
            "suspect": self._say,
            "spike": self._say,
            "healed": self._say,
            "rollback": self._roll_back,
            "done": self._end,
        }

    def take(self, record: Record) -> None:
        if record["kind"] in self._changes:
            self._changes[record["kind"]](record)

    def _begin(self, record: Record) -> None:
        self.attempts += 1
        self._forget_from(record["step"])

    def _commit(self, record: Record) -> None:
        self.checkpoints = [c for c in self.checkpoints if c < record["step"]]
        self.checkpoints.append(record["step"])

    def _remove(self, record: Record) -> None:
        if self.checkpoints[-1:] == [record["step"]]:  # a damaged result has to be made again
            self.done = False
        self.checkpoints = [c for c in self.checkpoints if c != record["step"]]

    def _say(self, record: Record) -> None:
        self.said.append(record)
        if record["kind"] == "healed":
            self.suspected.pop(record["channel"], None)
        else:
            self.suspected[record["channel"]] = record["onset"]

    def _forget_from(self, step: int) -> None:
        """Forget what was said at a step and later: these steps are done again.

        What was said before leads to the suspicions that are open, as in the detector that an
        attempt feeds with the steps before its first: what healed later is open again.
        """
        said = [record for record in self.said if record["step"] < step]
        self.said, self.suspected = [], {}
        for record in said:
            self._say(record)

    def _roll_back(self, record: Record) -> None:
        step = record["step"]
        self._forget_from(step)
        self.segments = [s for s in self.segments if s[0] < step] + [(step, record["seed"])]
        self.checkpoints = [c for c in self.checkpoints if c <= step]
        self.lowered = [span for span in self.lowered if span[0] < step]
        if steps := record["learning_rate_steps"]:
            self.lowered.append((step, step + steps, record["learning_rate_factor"]))

    def _end(self, record: Record) -> None:
        self.done = True
