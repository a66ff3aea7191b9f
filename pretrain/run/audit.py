"""Prove from a run's records that every block was used once: `python -m pretrain audit RUN`.

Two witnesses are compared. The ledger says which lineage each attempt followed, and so which blocks
each step must have read. Each line of metrics.jsonl holds the hash of the blocks that its step did
read. A step without a line is unproved: it has one witness only. Read `examine`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.records import decode
from pretrain.config.run import BatchConfig
from pretrain.data.order import Lineage
from pretrain.run import checkpoints, ledger, metrics
from pretrain.supervision.decide import ENDINGS

Line = dict[str, Any]
EXIT_SOUND, EXIT_NOT_SOUND, EXIT_UNPROVED = 0, 1, 3
_CHUNK = 1 << 22
"""Places that are looked up at once."""


@dataclasses.dataclass
class Audit:
    """What was found, in plain words."""

    proved: list[str] = dataclasses.field(default_factory=list)
    """What holds."""
    unproved: list[str] = dataclasses.field(default_factory=list)
    """What may hold, but a record that would show it is missing."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """What does not hold; empty for a sound run."""


def audit(run: Path) -> Audit:
    """Examine a run's folder.

    Raises:
        ValueError: it has no ledger, or one that does not verify; its line is named.
    """
    records = ledger.read(run / ledger.FILE_NAME)
    if not records:
        raise ValueError(
            f"{run}: has no {ledger.FILE_NAME}; accepted: the folder of a run that was begun"
        )
    found = examine(records, metrics.read(run / metrics.METRICS))
    _compare_with_disk(run, records, found)
    return found


def examine(records: Sequence[ledger.Record], lines: Sequence[Line]) -> Audit:
    """Prove from the ledger that every block was used once an epoch, or say where not.

    Args:
        records: of the ledger, its chain of hashes already verified.
        lines: of metrics.jsonl.
    """
    found = Audit([f"ledger: {len(records):,} records, each follows from the one before"])
    attempts = [record for record in records if record["kind"] == "attempt"]
    created = next((record for record in records if record["kind"] == "created"), None)
    if created is None or (attempts and attempts[0]["number"] < created["number"]):
        found.problems.append("no record of the run's creation stands before its first attempt")
        return found
    batch = decode(BatchConfig, created["batch"], f"{ledger.FILE_NAME}: created.batch.")
    seed = created["seed"]
    done: dict[int, range] = {}
    recorded: set[tuple[int, int]] = set()
    ends = [*(record["number"] for record in attempts[1:]), len(records)]
    for record, end in zip(attempts, ends, strict=False):
        attempt = record["attempt"]
        before = ledger.fold(records[: record["number"]], seed)
        lineage = before.lineage(record["blocks"], batch.first_block)
        own = [line for line in lines if line["attempt"] == attempt]
        told = records[record["number"] + 1 : end]
        found.problems += [
            f"attempt {attempt}: {problem}"
            for problem in (
                *_bad_start(record, before, lineage, records),
                *_bad_steps(record, own, lineage, batch),
                *_strangers(attempt, told),
            )
        ]
        done[attempt] = _steps_done(record, told, own)
        recorded |= {(attempt, line["step"]) for line in own}
    unknown = {line["attempt"] for line in lines} - done.keys()
    found.problems += [
        f"metrics.jsonl has lines of attempt {attempt}, which the ledger does not know"
        for attempt in sorted(unknown)
    ]
    if found.problems or not attempts:
        return found
    found.proved += [
        f"{len(attempts)} attempts: each began at step 0 or at a checkpoint that was committed and "
        "is the one that was committed",
        f"{len(lines):,} recorded steps: each read the blocks that the ledger's lineage gives it",
    ]
    _count_blocks(ledger.fold(records, seed), attempts, done, batch, found, recorded)
    return found


def _steps_done(
    record: ledger.Record, told: Sequence[ledger.Record], lines: Sequence[Line]
) -> range:
    """The steps that an attempt did, as far as ledger and metrics.jsonl show.

    Args:
        record: its own.
        told: the ledger's records from it to the next attempt's.
        lines: its lines of metrics.jsonl.
    """
    # A commit speaks of the updates done, what the detector says of the step just done.
    updates = {"commit": 0, "done": 0, "spike": 1, "suspect": 1, "healed": 1}
    ends = [r["step"] + updates[r["kind"]] for r in told if r["kind"] in updates]
    return range(record["step"], max([record["step"], *ends, *(x["step"] + 1 for x in lines)]))


def _bad_start(
    record: ledger.Record,
    before: ledger.RunState,
    lineage: Lineage,
    records: Sequence[ledger.Record],
) -> Iterator[str]:
    """What is wrong with how an attempt began."""
    step = record["step"]
    if record["attempt"] <= (newest := _newest_attempt(records[: record["number"]])):
        yield f"began after attempt {newest}, whose number is not below its own"
    if ledger.lineage_record(lineage) != record["lineage"]:
        yield f"followed the lineage {record['lineage']}, the ledger leads to another"
    if step == 0:
        return
    if step not in before.checkpoints:
        yield f"began at step {step}, of which no committed checkpoint was left"
        return
    commits = [r for r in records[: record["number"]] if r["kind"] == "commit"]
    committed = next(r for r in reversed(commits) if r["step"] == step)
    if committed["manifest"] != record["manifest"]:
        yield f"loaded another checkpoint of step {step} than the one that was committed"


def _newest_attempt(records: Sequence[ledger.Record]) -> int:
    """Number of the newest attempt that began; 0 where none did."""
    return max((r["attempt"] for r in records if r["kind"] == "attempt"), default=0)


def _bad_steps(
    record: ledger.Record, lines: Sequence[Line], lineage: Lineage, batch: BatchConfig
) -> Iterator[str]:
    """What is wrong with the steps that an attempt recorded; at most one problem of a kind."""
    before = record["step"] - 1
    for line in lines:
        step = line["step"]
        if step <= before:
            yield f"metrics.jsonl has step {step} where a step above {before} must follow"
            return
        before, place = step, batch.first_block(step)
        read = lineage.digest(place, batch.size(step))
        if line["blocks"] != read:
            yield f"step {step} read other blocks than the lineage has at places {place} and on"
            return
        if line["seed"] != lineage.seed_at(place):
            yield f"step {step} used seed {line['seed']}, the lineage says {lineage.seed_at(place)}"
            return


def _strangers(attempt: int, told: Sequence[ledger.Record]) -> Iterator[str]:
    """Records that another attempt wrote while this one was the newest.

    What an attempt tells the ledger carries its number and stands between its own `attempt` record
    and the next one. The supervisor's records of how a launch ended stand there too; their number
    is higher where that launch never began.
    """
    for record in told:
        writer = record.get("attempt", attempt)
        if writer < attempt or (writer > attempt and record["kind"] not in ENDINGS):
            over = "was over" if writer < attempt else "had not begun"
            yield (
                f"record {record['number']} ({record['kind']}) was written by attempt {writer}, "
                f"which {over}"
            )


def surviving_steps(
    attempts: Sequence[ledger.Record], done: dict[int, range], end: int | None = None
) -> list[tuple[int, range]]:
    """Of each attempt, the steps whose outcome lives on: those below where the next one began.

    Args:
        attempts: their records, oldest first.
        done: of each attempt's number, the steps that it did.
        end: step to which the run was rolled back since the last attempt, if it was.
    """
    kept = []
    limit = end
    for record in reversed(attempts):
        steps = done[record["attempt"]]
        stop = steps.stop if limit is None else min(steps.stop, limit)
        kept.append((record["attempt"], range(steps.start, max(steps.start, stop))))
        limit = steps.start if limit is None else min(limit, steps.start)
    return kept[::-1]


def _count_blocks(
    state: ledger.RunState,
    attempts: Sequence[ledger.Record],
    done: dict[int, range],
    batch: BatchConfig,
    found: Audit,
    recorded: Collection[tuple[int, int]],
) -> None:
    """Count every block that a surviving step read, and say which of these steps are unproved.

    Args:
        state: of the whole ledger.
        attempts: their records, oldest first.
        done: of each attempt's number, the steps that it did.
        batch: the recipe's.
        found: takes what is found.
        recorded: (attempt, step) of each line of metrics.jsonl.
    """
    rolled_back = bool(state.last and state.last["kind"] == "rollback")
    kept = surviving_steps(attempts, done, state.segments[-1][0] if rolled_back else None)
    steps = [step for _, part in kept for step in part]
    if steps != list(range(len(steps))):
        gap = next(number for number, step in enumerate(steps) if number != step)
        found.problems.append(f"step {gap} is missing from the steps that survive")
        return
    missing = [s for attempt, part in kept for s in part if (attempt, s) not in recorded]
    if missing:
        found.unproved.append(
            f"{len(missing):,} of {len(steps):,} steps have no line in metrics.jsonl, so that only "
            f"the ledger says what they read: {_ranges(missing)}"
        )
    lineage = state.lineage(attempts[-1]["blocks"], batch.first_block)
    end = batch.first_block(len(steps))
    found.proved.append(
        f"{len(steps):,} steps survive, each once: {end:,} blocks, {lineage.epoch(end):.2f} epochs "
        f"of {lineage.total:,}"
    )
    skipped, skipped_epochs = lineage.skipped()
    for epoch, counts, whole in _epochs(lineage, end):
        left_out = skipped[skipped_epochs == epoch]
        if counts.max() > 1:
            found.problems.append(f"epoch {epoch}: block {int(counts.argmax())} was read twice")
        elif counts[left_out].any():
            block = int(left_out[counts[left_out].argmax()])
            found.problems.append(f"epoch {epoch}: block {block} was read, though skipped")
        elif whole and int(counts.sum()) + len(left_out) != lineage.total:
            found.problems.append(
                f"epoch {epoch}: {lineage.total - len(left_out) - int(counts.sum()):,} blocks were "
                "neither read nor declared skipped"
            )
        else:
            words = f"{int(counts.sum()):,} blocks read, " + (
                "each once" if whole else "none twice"
            )
            skips = f", {len(left_out):,} declared skipped" if len(left_out) else ""
            found.proved.append(f"epoch {epoch}: {words}{skips}")


def _ranges(steps: Sequence[int]) -> str:
    """Ascending numbers in short, such as "3, 7 to 12"."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in ranges)


def _epochs(lineage: Lineage, end: int) -> Iterator[tuple[int, Any, bool]]:
    """Of each epoch, how often the places below `end` hold each block, and if it is over."""
    counts = np.zeros(lineage.total, dtype=np.uint8)
    current = 0
    for first in range(0, end, _CHUNK):
        blocks, epochs = lineage.blocks(first, min(_CHUNK, end - first))
        for epoch in np.unique(epochs).tolist():
            if epoch != current:
                yield current, counts, True
                counts, current = np.zeros_like(counts), epoch
            np.add.at(counts, blocks[epochs == epoch], 1)
    if counts.any():
        over = bool(lineage.blocks(end, 1)[1][0] > current)
        yield current, counts, over


def _compare_with_disk(run: Path, records: Sequence[ledger.Record], found: Audit) -> None:
    """Whether the checkpoints that the ledger counts on are there, as they were committed."""
    state = ledger.fold(records, 0)
    committed = {r["step"]: r["manifest"] for r in records if r["kind"] == "commit"}
    for step in state.checkpoints:
        folder = checkpoints.folder_of(run, step)
        try:
            checkpoints.read_manifest(folder)
            whole = checkpoints.manifest_hash(run, step) == committed[step]
        except (OSError, ValueError) as error:
            found.problems.append(f"checkpoint of step {step}: {error}")
            continue
        if not whole:
            found.problems.append(f"{folder}: is another one than was committed")
    if state.checkpoints and not found.problems:
        found.proved.append(
            f"{len(state.checkpoints)} checkpoints on disk, each as it was committed: steps "
            + ", ".join(map(str, state.checkpoints))
        )


def report(found: Audit, write: Callable[[str], object]) -> int:
    """Write what was found; returns the exit code."""
    marks = (
        ("proved  ", found.proved),
        ("UNPROVED", found.unproved),
        ("PROBLEM ", found.problems),
    )
    for mark, lines in marks:
        for line in lines:
            write(f"{mark} {line}\n")
    if found.problems:
        write("not sound\n")
        return EXIT_NOT_SOUND
    if found.unproved:
        write("not proved\n")
        return EXIT_UNPROVED
    write("sound\n")
    return EXIT_SOUND
