"""What a run's ledger proves: `python -m pretrain audit RUN`.

Two witnesses are compared. The ledger says which lineage each attempt followed, and so which blocks
each step must have read. Each line of metrics.jsonl holds the hash of the blocks that its step did
read. Read `examine`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain import checkpoints, ledger, metrics
from pretrain.config import BatchConfig
from pretrain.order import Lineage

Line = dict[str, Any]
_CHUNK = 1 << 22
"""Places that are looked up at once."""


@dataclasses.dataclass
class Audit:
    """What was found."""

    proved: list[str] = dataclasses.field(default_factory=list)
    """In plain words, what holds."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """What does not; empty for a sound run."""


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
    batch, seed = BatchConfig(**created["batch"]), created["seed"]
    done: dict[int, range] = {}
    for number, record in enumerate(attempts):
        before = ledger.fold(records[: record["number"]], seed)
        lineage = before.lineage(record["blocks"], batch.first_block)
        own = [line for line in lines if line["attempt"] == record["attempt"]]
        found.problems += [
            f"attempt {record['attempt']}: {problem}"
            for problem in (
                *_bad_start(record, before, lineage, records),
                *_bad_steps(record, own, before, lineage, batch),
                *_strangers(record, attempts[number + 1 :], records),
            )
        ]
        done[record["attempt"]] = range(record["step"], record["step"] + len(own))
    if found.problems or not attempts:
        return found
    found.proved += [
        f"{len(attempts)} attempts: each began at step 0 or at a checkpoint that was committed and "
        "is the one that was committed",
        f"{len(lines):,} steps done: each read the blocks that the ledger's lineage gives it",
    ]
    _count_blocks(ledger.fold(records, seed), attempts, done, batch, found)
    return found


def _bad_start(
    record: ledger.Record,
    before: ledger.RunState,
    lineage: Lineage,
    records: Sequence[ledger.Record],
) -> Iterator[str]:
    """What is wrong with how an attempt began."""
    step = record["step"]
    if record["attempt"] != before.attempts + 1:
        yield f"is number {before.attempts + 1} in the ledger"
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


def _bad_steps(
    record: ledger.Record,
    lines: Sequence[Line],
    state: ledger.RunState,
    lineage: Lineage,
    batch: BatchConfig,
) -> Iterator[str]:
    """What is wrong with the steps that an attempt did; at most one problem of a kind."""
    for number, line in enumerate(lines):
        step = record["step"] + number
        if line["step"] != step:
            yield f"metrics.jsonl has step {line['step']} where step {step} must follow"
            return
        place = batch.first_block(step)
        read = lineage.digest(place, batch.size(step))
        if line["blocks"] != read:
            yield f"step {step} read other blocks than the lineage has at places {place} and on"
            return
        if line["seed"] != lineage.seed_at(place):
            yield f"step {step} used seed {line['seed']}, the lineage says {lineage.seed_at(place)}"
            return


def _strangers(
    record: ledger.Record, later: Sequence[ledger.Record], records: Sequence[ledger.Record]
) -> Iterator[str]:
    """Records that another attempt wrote while this one was the newest."""
    end = later[0]["number"] if later else len(records)
    for other in records[record["number"] + 1 : end]:
        if other.get("attempt", record["attempt"]) != record["attempt"]:
            yield (
                f"record {other['number']} ({other['kind']}) was written by attempt "
                f"{other['attempt']}, which was over"
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
) -> None:
    """Count every block that a surviving step read."""
    rolled_back = bool(state.last and state.last["kind"] == "rollback")
    kept = surviving_steps(attempts, done, state.segments[-1][0] if rolled_back else None)
    steps = [step for _, part in kept for step in part]
    if steps != list(range(len(steps))):
        gap = next(number for number, step in enumerate(steps) if number != step)
        found.problems.append(f"step {gap} is missing from the steps that survive")
        return
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
    """Say what was found; returns the exit code."""
    for line in found.proved:
        write(f"proved   {line}\n")
    for line in found.problems:
        write(f"PROBLEM  {line}\n")
    write(f"{'not sound' if found.problems else 'sound'}\n")
    return 1 if found.problems else 0
