"""ledger.jsonl: what happened to a run, append-only and hash-chained.

Each line is a JSON object with `number`, `time`, `kind`, `previous` (the hash of the line before)
and the fields of its kind. A last line that a crash left incomplete is ignored, and cut off at the
next append; if it lacks nothing but its line feed, it counts. Any other line that does not verify
is an error.

While an attempt lives, only its rank 0 appends; the supervisor appends when no rank is left. What
the run does next follows from the ledger alone: see `run_state`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import files
from data_prep.common.records import check_format
from pretrain.data.mixture import Mixture
from pretrain.data.order import Order

Record = dict[str, Any]
FILE_NAME = "ledger.jsonl"
FORMAT_VERSION = 1
"""Written into the first record; absent: 1."""
ENDINGS = frozenset({"crash", "hang", "preempted", "interrupted"})
"""Kinds of records with which the supervisor says how a launch ended."""
_START = "0" * 32
_BEGINNING = b'{"number": '
"""Of every line."""
_EDITED = re.compile(rb"\A\xef\xbb\xbf|\r\n|^\n", re.MULTILINE)
"""What editors and transfers leave: a byte-order mark, line ends of Windows, empty lines."""


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=16).hexdigest()


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
    try:
        data = files.retried(path.read_bytes)
    except FileNotFoundError:
        data = b""
    records: list[Record] = []
    previous, size, lacks = _START, 0, b""
    for line in data.splitlines(keepends=True):
        lacks = b"" if line.endswith(b"\n") else b"\n"
        try:
            record = json.loads(line)
            valid = record["previous"] == previous and record["number"] == len(records)
        except (ValueError, RecursionError, TypeError, KeyError):
            valid = False
        if not valid and lacks and _is_torn(line):
            lacks = b""
            break
        if not valid:
            edited = f"`sed -i '1s/^\\xef\\xbb\\xbf//; s/\\r$//; /^$/d' {shlex.quote(str(path))}`"
            way = f"{edited} undoes it" if _EDITED.search(data) else "put a backup in its place"
            raise ValueError(
                f"{path}: line {len(records) + 1} does not follow from the line before it; the "
                f"ledger was changed by something other than zeroclap; {way}"
            )
        if not records:
            check_format(record.get("format_version", 1), FORMAT_VERSION, path)
        records.append(record)
        previous, size = _digest(line + lacks), size + len(line)
    return records, size, lacks, previous


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
    record: Record = {
        "number": len(records),
        "time": round(time.time(), 3),
        "kind": kind,
        **fields,
        "previous": previous,
    }
    line = lacks + files.strict_json(record).encode() + b"\n"
    with files.naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if not records:
                files.fsync(path.parent)
            _write_at(descriptor, size, line)
        finally:
            os.close(descriptor)
    written: Record = json.loads(line)
    return written


def _write_at(descriptor: int, size: int, line: bytes) -> None:
    """Write `line` after the first `size` bytes; if that fails, leave only those bytes."""
    try:
        os.ftruncate(descriptor, size)
        written = 0
        while written < len(line):  # a nearly full disk takes a part and refuses the rest
            written += os.pwrite(descriptor, line[written:], size + written)
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


@dataclasses.dataclass
class RunState:
    """The state of a run according to its ledger; made by `run_state`."""

    seed: int
    """The recipe's."""
    attempts: int
    """Number of attempts that began."""
    next_attempt: int
    """Number of the next launch: above every earlier launch's, whether that began or not."""
    spikes: tuple[Record, ...]
    """Every confirmed spike."""
    rollbacks: tuple[Record, ...]
    """Every rollback."""
    last: Record | None
    """The newest record."""
    segments: tuple[tuple[int, int], ...]
    """(first step, seed) of the surviving lineage, oldest first."""
    lowered: tuple[tuple[int, int, float], ...] = ()
    """(first step, end step, factor) of lowered learning rates after rollbacks; may overlap."""
    checkpoints: tuple[int, ...] = ()
    """Steps of the committed checkpoints on the surviving lineage that are kept, oldest first."""
    suspicions: tuple[Record, ...] = ()
    """Records about suspicions and spikes on the surviving lineage."""
    finished_steps: int = 0
    """Steps of the recipe that the run has finished; 0 before. It may be extended since."""

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

    def learning_rate_factor(self, step: int) -> float:
        """Factor on the schedule's learning rate in a step."""
        return math.prod(factor for first, end, factor in self.lowered if first <= step < end)

    def order(
        self, mixture: Mixture, totals: Sequence[int], first_block: Callable[[int], int]
    ) -> Order:
        """The order of blocks that results from the rollbacks.

        Args:
            mixture: of the run's corpora.
            totals: blocks of an epoch of each corpus.
            first_block: returns the place of a step's first block, counted over all epochs.
        """
        order = Order.begin(mixture, totals, self.seed)
        for record in self.rollbacks:
            skip = record.get("skip")
            places = (first_block(skip[0]), first_block(skip[1])) if skip else None
            order = order.rolled_back(first_block(record["step"]), record["seed"], places)
        return order


@dataclasses.dataclass(frozen=True)
class Corpora:
    """What an attempt's record says of the corpora that it read."""

    names: tuple[str, ...]
    """A single one is named ""."""
    totals: tuple[int, ...]
    """Blocks of each."""
    weights: tuple[tuple[int, tuple[float, ...]], ...]
    """(first step, weight of each corpus)."""

    @classmethod
    def of(cls, record: Record) -> Corpora:
        """The corpora of an attempt's record."""
        if "corpora" not in record:
            return cls(("",), (record["blocks"],), ((0, (1.0,)),))
        names = tuple(corpus["name"] for corpus in record["corpora"])
        totals = tuple(corpus["blocks"] for corpus in record["corpora"])
        return cls(names, totals, tuple((step, tuple(each)) for step, each in record["weights"]))

    def order(self, state: RunState, first_block: Callable[[int], int]) -> Order:
        """The order of their blocks in a run; `first_block` returns the place of a step's first."""
        mixture = Mixture.by_step(self.weights, first_block)
        return state.order(mixture, self.totals, first_block)


def lineage_record(order: Order, end_place: int | None = None) -> list[Any]:
    """Identify an order as ledger and manifests store it: one list a segment, [segments, 4].

    Of several corpora it is a list of these. The last ones are left out if they have no segment, so
    that a corpus that is added later changes no record of what was read before.

    Args:
        order: of a run.
        end_place: leave out the segments that nothing before this place was drawn from.
    """
    ends = [None] * len(order.lineages) if end_place is None else order.mixture.counts(end_place)
    lineages = [
        [list(s.identity) for s in lineage.segments if end is None or s.first_position < end]
        for lineage, end in zip(order.lineages, ends, strict=True)
    ]
    while len(lineages) > 1 and not lineages[-1]:
        lineages.pop()
    return lineages if len(lineages) > 1 else lineages[0]


def corpora_digests(records: Sequence[Record]) -> list[tuple[str, str]]:
    """(name, digest) of each corpus of a run that was created; the name of a single one is ""."""
    known = [
        r["corpora"] for r in records if r["kind"] in ("created", "attempt") and "corpora" in r
    ]
    if known:
        return [(corpus["name"], corpus["digest"]) for corpus in known[-1]]
    created = next(record for record in records if record["kind"] == "created")
    return [("", created["corpus"])]


def created(records: Sequence[Record]) -> Record | None:
    """Return the record of the run's creation, if there is one yet."""
    return next((record for record in records if record["kind"] == "created"), None)


def origin(records: Sequence[Record]) -> dict[str, Any] | None:
    """Say where a run's first weights came from; None if they were drawn from its seed.

    Returns:
        `path` of the model, `files` (hex sha256 of its files of weights, by name), and `sha256` of
        the weights that the run keeps and starts from.
    """
    found: dict[str, Any] | None = (created(records) or {}).get("init_from")
    return found


def describe_origin(found: Mapping[str, Any]) -> str:
    """Describe a result of `origin` in words."""
    hashes = ", ".join(f"{name} {digest[:12]}" for name, digest in found["files"].items())
    return f"those of {found['path']} ({hashes})"


def run_state(records: Sequence[Record], seed: int) -> RunState:
    """The state that a ledger's records lead to, for a recipe with seed `seed`."""
    state = RunState(
        seed,
        attempts=sum(r["kind"] == "attempt" for r in records),
        next_attempt=1 + max((r["attempt"] for r in records if "attempt" in r), default=0),
        spikes=tuple(r for r in records if r["kind"] == "spike"),
        rollbacks=tuple(r for r in records if r["kind"] == "rollback"),
        last=records[-1] if records else None,
        segments=((0, seed),),
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
        case "rollback":
            _roll_back(state, record)
        case "fork":  # only one checkpoint of the source was taken along
            _go_back_to(state, step)
            state.checkpoints = (step,)
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


def _roll_back(state: RunState, record: Record) -> None:
    step = record["step"]
    _go_back_to(state, step)
    state.segments = (*(s for s in state.segments if s[0] < step), (step, record["seed"]))
    state.checkpoints = tuple(c for c in state.checkpoints if c <= step)
    state.lowered = tuple(span for span in state.lowered if span[0] < step)
    if steps := record["learning_rate_steps"]:
        state.lowered += ((step, step + steps, record["learning_rate_factor"]),)
