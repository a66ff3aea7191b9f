"""ledger.jsonl: what happened to a run, append-only and hash-chained.

Each line is a JSON object with `number`, `time`, `kind`, the fields of its kind, `previous` (the
hash of the line before) and `hash` (of the line itself up to it). A last line that a crash left
incomplete is ignored, and cut off at the next append; if it lacks nothing but its line feed, it
counts. Any other line that does not verify is an error.

While an attempt lives, only its rank 0 appends; the supervisor appends when no rank is left. What
the run does next follows from the ledger alone: see `run_state`.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import files

Record = dict[str, Any]
FILE_NAME = "ledger.jsonl"
FORMAT_VERSION = 1
"""Written into the first record."""
ENDINGS = frozenset({"crash", "hang", "preempted"})
"""Kinds of records with which the supervisor says how a launch ended."""
START, SPIKE, USER, FORK = "start", "spike", "user", "fork"
"""Why a segment began: with the run, to roll back from a spike, because the user gave another
recipe, or because the run goes on from a checkpoint of another one."""
_FIRST = "0" * 32
"""In place of a hash of the line before."""
_BEGINNING = b'{"number": '
"""Of every line."""
_OWN = b', "hash": '
"""Before the hash of a line, which is its last field."""
_EDITED = re.compile(rb"\A\xef\xbb\xbf|\r\n|^\n", re.MULTILINE)
"""What editors and transfers leave: a byte-order mark, line ends of Windows, empty lines."""


def read_ledger(path: Path) -> list[Record]:
    """Return the records of a ledger, oldest first, without an incomplete last line.

    Raises:
        ValueError: a line does not follow from the one before it, or the file is a symbolic link,
            through which another file would be changed.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Record], int, bytes, str]:
    """Return the records, how many bytes hold them, what the last line lacks, and its hash."""
    files.check_not_link(path)
    data = files.read_bytes(path)
    records: list[Record] = []
    previous, size, lacks = _FIRST, 0, b""
    for line in data.splitlines(keepends=True):
        lacks = b"" if line.endswith(b"\n") else b"\n"
        try:
            record = json.loads(line)
            own = _hash(line.rpartition(_OWN)[0])
            expected = {"number": len(records), "previous": previous, "hash": own}
            valid = expected.items() <= record.items()
        except files.MALFORMED:
            valid = False
        if not valid and lacks and _is_torn(line):
            lacks = b""
            break
        if not valid:
            edited = f"`sed -i '1s/^\\xef\\xbb\\xbf//; s/\\r$//; /^$/d' {shlex.quote(str(path))}`"
            way = f"{edited} undoes it" if _EDITED.search(data) else "put a backup in its place"
            raise ValueError(
                f"{path}: line {len(records) + 1} does not follow from the line before it, or is "
                f"not as written; the ledger was changed by something other than zeroclap; {way}"
            )
        if not records:
            files.check_format(record.get("format_version"), FORMAT_VERSION, path)
        records.append(record)
        previous = _hash(line + lacks)
        size += len(line)
    return records, size, lacks, previous


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _is_torn(line: bytes) -> bool:
    """Return whether a last line may be the beginning of a record, with zeros for what is lost."""
    written = line.rstrip(b"\0")
    return written.startswith(_BEGINNING) or _BEGINNING.startswith(written)


def append(path: Path, kind: str, **fields: object) -> Record:
    """Append a record, wait until it is on disk, and return it as `read_ledger` will.

    Raises:
        OSError: names the file; the record was not added.
    """
    records, size, lacks, previous = _read(path)
    if not records:
        fields = {"format_version": FORMAT_VERSION, **fields}
    head = {"number": len(records), "time": round(time.time(), 3), "kind": kind}
    record = {**head, **fields, "previous": previous}
    text = files.strict_json(record).removesuffix("}").encode()
    line = lacks + text + _OWN + f'"{_hash(text)}"}}\n'.encode()
    with files.naming(path):
        try:
            with path.open("ab") as file:
                if not records:
                    files.fsync(path.parent)
                file.truncate(size)  # in place of a torn line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # a nearly full disk takes a part
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise
    return json.loads(line)


@dataclasses.dataclass
class RunState:
    """The state of a run according to its ledger; made by `run_state`."""

    attempts: int
    """Number of attempts that began."""
    next_attempt: int
    """Number of the next launch: above every earlier launch's, whether that began or not."""
    spikes: tuple[Record, ...]
    """Every confirmed spike."""
    rollbacks: tuple[Record, ...]
    """The segments of every rollback."""
    seeds: frozenset[int]
    """Seeds used so far, on any lineage."""
    manifests: Mapping[int, str]
    """Hash of the manifest of each step's newest commit."""
    segments: tuple[Record, ...] = ()
    """The segments that hold, as they were recorded. A rollback ends those of rollbacks that begin
    at its step or later; another recipe those of recipes, and rollbacks that begin later."""
    checkpoints: tuple[int, ...] = ()
    """Steps of the committed checkpoints on the surviving lineage that are kept, oldest first."""
    suspicions: tuple[Record, ...] = ()
    """Records about suspicions and spikes on the surviving lineage."""
    finished_steps: int = 0
    """Steps of the recipe that the run has finished; 0 before. Another recipe may follow."""

    @property
    def suspected(self) -> tuple[int, ...]:
        """Onsets of open suspicions and spikes: neither healed nor a new level, and not undone."""
        onsets: dict[str, int] = {}  # by channel
        for record in self.suspicions:
            if record["kind"] in ("healed", "new-level"):
                onsets.pop(record["channel"], None)
            else:
                onset = record["onset"]
                onsets[record["channel"]] = min(onset, onsets.get(record["channel"], onset))
        return tuple(onsets.values())

    @property
    def unanswered_spike(self) -> Record | None:
        """The newest spike, unless a segment has begun since at or before its step."""
        if not self.spikes:
            return None
        newest = self.spikes[-1]
        answers = [r["number"] for r in self.segments if r["step"] <= newest["step"]]
        return newest if max(answers, default=-1) < newest["number"] else None

    @property
    def suspected_since(self) -> int | None:
        """The earliest onset of an open suspicion."""
        return min(self.suspected, default=None)

    @property
    def tainted(self) -> tuple[int, ...]:
        """Steps of the checkpoints that were saved after a suspected onset."""
        onset = self.suspected_since
        return () if onset is None else tuple(step for step in self.checkpoints if step > onset)

    def is_done(self, steps: int) -> bool:
        """Whether a run of so many steps is finished."""
        return self.finished_steps >= steps

    def resume_step(self) -> int:
        """Number of updates in the newest surviving checkpoint; 0 without one."""
        return self.checkpoints[-1] if self.checkpoints else 0

    @property
    def seeds_by_step(self) -> list[tuple[int, int]]:
        """(first step, seed) on the surviving lineage, ascending."""
        return [*{r["step"]: r["seed"] for r in self.segments if "seed" in r}.items()]

    def learning_rate_factor(self, step: int) -> float:
        """Factor on the schedule's learning rate in a step; several may hold at once."""
        return math.prod(
            r["learning_rate_factor"]
            for r in segments(self.segments, SPIKE)
            if r["step"] <= step < r["step"] + r["learning_rate_steps"]
        )


def segments(records: Iterable[Record], why: str = "") -> list[Record]:
    """Return the records of segments, or of those that began for one reason, oldest first.

    `why` is START, SPIKE, USER or FORK. Each has the `step` that it begins at. START, USER and FORK
    have what their recipe lets the steps read (records/segments.py), START and SPIKE a `seed`;
    SPIKE has the fields of `policy.Rollback`, FORK the `run` that it came from.
    """
    return [r for r in records if r["kind"] == "segment" and why in ("", r["why"])]


def updates_kept(records: Iterable[Record]) -> dict[int, int]:
    """Return how many updates count after each attempt, by its number.

    It is all of them, unless a later segment or attempt began at an earlier step.
    """
    kept = dict[int, int]()
    for record in records:
        if record["kind"] in {"segment", "attempt"}:
            kept = {attempt: min(updates, record["step"]) for attempt, updates in kept.items()}
        if record["kind"] == "attempt":
            kept[record["attempt"]] = sys.maxsize
    return kept


def created(records: Iterable[Record]) -> Record | None:
    """Return the first segment of a run, if it has begun."""
    return next(iter(segments(records, START)), None)


def origin(records: Sequence[Record]) -> dict[str, Any] | None:
    """Say where a run's first weights came from; None if they were drawn from its seed.

    Returns:
        `path` of the model, `files` (hex sha256 of its files of weights, by name), and `sha256` of
        the weights that the run keeps and starts from.
    """
    return (created(records) or {}).get("init_from")


def describe_origin(found: Mapping[str, Any]) -> str:
    """Describe a result of `origin` in words."""
    hashes = ", ".join(f"{name} {digest[:12]}" for name, digest in found["files"].items())
    return f"those of {found['path']} ({hashes})"


def run_state(records: Sequence[Record]) -> RunState:
    """The state that a ledger's records lead to."""
    rollbacks = segments(records, SPIKE)
    state = RunState(
        attempts=sum(r["kind"] == "attempt" for r in records),
        next_attempt=1 + max((r["attempt"] for r in records if "attempt" in r), default=0),
        spikes=tuple(r for r in records if r["kind"] == "spike"),
        rollbacks=tuple(rollbacks),
        seeds=frozenset(r["seed"] for r in (*segments(records, START), *rollbacks)),
        manifests={r["step"]: r.get("manifest", "") for r in records if r["kind"] == "commit"},
    )
    for record in records:
        _apply(state, record)
    return state


def _apply(state: RunState, record: Record) -> None:
    """Apply a record to what follows from their order; other kinds change nothing."""
    step = record.get("step", 0)
    match record["kind"]:
        case "attempt":
            _go_back_to(state, step)
        case "commit":
            state.checkpoints = (*(c for c in state.checkpoints if c < step), step)
        case "delete" | "reject":
            _remove(state, step)
        case "suspect" | "spike" | "healed" | "new-level":
            state.suspicions += (record,)
        case "segment":
            _begin_segment(state, record)
        case "done":
            state.finished_steps = step


def _remove(state: RunState, step: int) -> None:
    if state.checkpoints[-1:] == (step,):  # the last steps have to be done again
        state.finished_steps = 0
    state.checkpoints = tuple(c for c in state.checkpoints if c != step)


def _go_back_to(state: RunState, step: int) -> None:
    """Undo the suspicions recorded at `step` and later: these steps are done again.

    A suspicion that ended at one of these steps is open again, as in the detector, which a new
    attempt feeds with the steps before its first.
    """
    if step < state.finished_steps:
        state.finished_steps = 0
    state.suspicions = tuple(r for r in state.suspicions if r["step"] < step)


def _begin_segment(state: RunState, record: Record) -> None:
    step, is_rollback = record["step"], record["why"] == SPIKE
    _go_back_to(state, step)

    def is_kept(before: Record) -> bool:
        if before["step"] < step or before["why"] == START:
            return True
        if is_rollback:
            return before["why"] != SPIKE
        return before["why"] == SPIKE and before["step"] == step

    state.segments = (*filter(is_kept, state.segments), record)
    # Of another run, a fork has the one checkpoint alone.
    state.checkpoints = tuple(
        c for c in state.checkpoints if c == step or (c < step and record["why"] != FORK)
    )
