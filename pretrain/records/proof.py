"""Check from a run's records that every block was read once an epoch.

Two records are compared. The ledger holds the segments of the run, and so the blocks that each step
must have read. Each line of metrics.jsonl holds the hash of the blocks that its step
did read. A step without a line is unchecked: only the ledger says what it read. If all records were
rewritten together, no comparison can show it. Start with `examine`.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from data_prep.common.wording import count, in_short
from pretrain.config.run import Sizes
from pretrain.data.lineage import Lineage, digest
from pretrain.data.order import Order
from pretrain.records import ledger, metrics, versions
from pretrain.records.segments import corpora_of, order_of, orders_of

Counts = npt.NDArray[np.uint8]
_CHUNK = 1 << 18
"""Number of places whose blocks are counted at once."""
_STEPS = 128
"""Number of steps whose blocks are looked up at once, several times faster than one by one."""


@dataclasses.dataclass
class Audit:
    """The findings, a sentence each."""

    checked: list[str] = dataclasses.field(default_factory=list)
    """What holds."""
    unchecked: list[str] = dataclasses.field(default_factory=list)
    """What may hold, but a record that is needed to check it is missing."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """What does not hold; empty for a sound run."""
    noted: list[str] = dataclasses.field(default_factory=list)
    """What a reader should know; it does not touch which blocks were read."""
    limits: list[str] = dataclasses.field(default_factory=list)
    """What the audit did not or cannot examine."""
    segments: list[str] = dataclasses.field(default_factory=list)
    """The run's, as lines of a table."""


def examine(records: Sequence[ledger.Record], lines: Sequence[metrics.Line]) -> Audit:
    """Check that every block was read once an epoch, or say where it was not.

    Args:
        records: of the ledger, whose chain of hashes is verified.
        lines: of metrics.jsonl.
    """
    found = Audit([f"ledger: {len(records):,} records, each follows from the one before"])
    found.noted += versions.changes(records)
    attempts = [record for record in records if record["kind"] == "attempt"]
    created = ledger.created(records)
    if not (created or attempts or lines):
        found.unchecked.append("which blocks were read: the run has not begun")
        return found
    if created is None or (attempts and attempts[0]["number"] < created["number"]):
        found.problems.append("no record of the run's creation stands before its first attempt")
        return found
    done: dict[int, range] = {}
    orders, lines_of = [*orders_of(records)], dict[int, list[metrics.Line]]()
    for line in lines:
        lines_of.setdefault(line["attempt"], []).append(line)
    for record, after in itertools.pairwise([*attempts, {"number": len(records)}]):
        attempt, number = record["attempt"], record["number"]
        earlier, during = records[:number], records[number + 1 : after["number"]]
        order, sizes = next(pair for first, pair in reversed(orders) if first < number)
        own = lines_of.get(attempt, [])
        problems = [*_bad_start(record, order, earlier), *_bad_steps(record, own, order, sizes)]
        problems += _bad_writers(attempt, during)
        found.problems += [f"attempt {attempt}: {problem}" for problem in problems]
        done[attempt] = _steps_done(record, during, own)
    found.problems += [
        f"metrics.jsonl has lines of attempt {attempt}, which the ledger does not know"
        for attempt in sorted(lines_of.keys() - done.keys())
    ]
    if found.problems or not attempts:
        return found
    found.checked += [
        f"{count(len(attempts), 'attempt')}: each began at step 0 or at a checkpoint that "
        "was committed and has not changed since",
        f"{len(lines):,} recorded steps: each read the blocks that the ledger's lineage gives it",
    ]
    recorded = {(line["attempt"], line["step"]) for line in lines}
    _count_blocks(records, attempts, done, recorded, found)
    return found


def _steps_done(
    record: ledger.Record, during: Sequence[ledger.Record], lines: Sequence[metrics.Line]
) -> range:
    """The steps that an attempt did, as far as ledger and metrics.jsonl show.

    Args:
        record: the attempt's record.
        during: the records between it and the next attempt's.
        lines: the attempt's lines of metrics.jsonl.
    """
    # A commit gives the number of updates done; the detector names the step just done.
    updates = {"commit": 0, "done": 0, "spike": 1, "suspect": 1, "healed": 1, "new-level": 1}
    ends = [r["step"] + updates[r["kind"]] for r in during if r["kind"] in updates]
    return range(record["step"], max([record["step"], *ends, *(x["step"] + 1 for x in lines)]))


def _bad_start(
    record: ledger.Record, order: Order, earlier: Sequence[ledger.Record]
) -> Iterator[str]:
    """Problems with the beginning of an attempt; `earlier` are the records before it."""
    step = record["step"]
    newest = max((r["attempt"] for r in earlier if r["kind"] == "attempt"), default=0)
    if record["attempt"] <= newest:
        yield f"began after attempt {newest}, whose number is not below its own"
    if order.identity() != record["lineage"]:
        yield f"followed the lineage {record['lineage']}, but the ledger has another"
    if step == 0:
        return
    state = ledger.run_state(earlier)
    if step not in state.checkpoints:
        yield f"began at step {step}, of which no committed checkpoint was left"
    elif state.manifests[step] != record["manifest"]:
        yield f"loaded another checkpoint of step {step} than the one that was committed"


def _bad_steps(
    record: ledger.Record, lines: Sequence[metrics.Line], order: Order, sizes: Sizes
) -> Iterator[str]:
    """The first problem with the steps that an attempt recorded."""
    before, first, end = record["step"] - 1, 0, 0
    for line in lines:
        step = line["step"]
        if step <= before:
            yield f"metrics.jsonl: step {step} follows step {before}; steps must increase"
            return
        before, place = step, sizes.first_block(step)
        if place >= end:  # steps increase, so what is looked up begins with this one
            first, end = place, sizes.first_block(step + _STEPS)
            blocks, epochs = order.blocks(first, end - first)
        own = slice(place - first, place - first + sizes.size(step))
        if line["blocks"] != digest(blocks[own], epochs[own]):
            yield f"step {step} read other blocks than the lineage's, from place {place} on"
            return
        if line["seed"] != order.seed_at(place):
            yield f"step {step} used seed {line['seed']}, the lineage says {order.seed_at(place)}"
            return


def _bad_writers(attempt: int, during: Sequence[ledger.Record]) -> Iterator[str]:
    """Records that another attempt wrote while this one was the newest.

    An attempt's records carry its number and stand between its `attempt` record and the next one.
    The supervisor's records of how a launch ended stand there too; their number is higher if that
    launch never began.
    """
    for record in during:
        writer = record.get("attempt", attempt)
        if writer < attempt or (writer > attempt and record["kind"] not in ledger.ENDINGS):
            yield (
                f"record {record['number']} ({record['kind']}) was written by attempt {writer}, "
                f"which {'was over' if writer < attempt else 'had not begun'}"
            )


def _count_blocks(
    records: Sequence[ledger.Record],
    attempts: Sequence[ledger.Record],
    done: dict[int, range],
    recorded: Collection[tuple[int, int]],
    found: Audit,
) -> None:
    """Count how often the surviving steps read each block, and name the unchecked steps.

    Args:
        records: of the ledger.
        attempts: those of attempts, oldest first.
        done: the steps that each attempt did, by number.
        recorded: (attempt, step) of each line of metrics.jsonl.
        found: the findings are added to it.
    """
    attempt_of: list[int] = []  # by surviving step
    for record in attempts:
        attempt, first = record["attempt"], record["step"]
        if first > len(attempt_of):
            found.problems.append(f"step {len(attempt_of)} is missing from the steps that survive")
            return
        attempt_of[first:] = [attempt] * len(done[attempt])
    # Launches that never began an attempt may have ended since, each with a record.
    later = ledger.segments(records[attempts[-1]["number"] :])
    del attempt_of[min((record["step"] for record in later), default=len(attempt_of)) :]
    steps = len(attempt_of)
    missing = [step for step, attempt in enumerate(attempt_of) if (attempt, step) not in recorded]
    if missing:
        found.unchecked.append(
            f"{len(missing):,} of {steps:,} steps have no line in metrics.jsonl, so that only "
            f"the ledger says what they read: {_ranges(missing)}"
        )
    order, sizes = order_of(records)
    names = [corpus["name"] for corpus in corpora_of(records)]
    end = sizes.first_block(steps)
    drawn = order.mixture.counts(end)
    parts = (
        f"{count(blocks, 'block')}{f' of {name}' if name else ''} ({in_short(read)} epochs)"
        for blocks, read, name in zip(drawn, order.epochs(end), names, strict=True)
    )
    found.checked.append(f"{steps:,} steps survive, each once: {', '.join(parts)}")
    for corpus, epoch, counts in _epochs(order, end):
        name, lineage = names[corpus], order.lineages[corpus]
        complete = drawn[corpus] >= lineage.start(epoch + 1)
        _judge_epoch(f"{name}, epoch" if name else "epoch", lineage, epoch, counts, complete, found)


def _judge_epoch(
    title: str, lineage: Lineage, epoch: int, counts: Counts, complete: bool, found: Audit
) -> None:
    """Say whether an epoch of a corpus was read as it should.

    Args:
        title: what messages call an epoch.
        lineage: of the corpus.
        epoch: its number.
        counts: how often each block was read in it.
        complete: whether all of it was drawn.
        found: the findings are added to it.
    """
    left_out = lineage.skipped(epoch)
    read = int(counts.sum())
    if counts.max() > 1:
        found.problems.append(f"{title} {epoch}: block {int(counts.argmax())} was read twice")
    elif counts[left_out].any():
        block = int(left_out[counts[left_out].argmax()])
        found.problems.append(f"{title} {epoch}: block {block} was read, though skipped")
    elif complete and read + len(left_out) != lineage.total:
        found.problems.append(
            f"{title} {epoch}: {lineage.total - len(left_out) - read:,} blocks were neither read "
            "nor declared skipped"
        )
    else:
        skips = f", {len(left_out):,} declared skipped" if len(left_out) else ""
        often = "each once" if complete else "none twice"
        found.checked.append(f"{title} {epoch}: {read:,} blocks read, {often}{skips}")


def _ranges(steps: Sequence[int]) -> str:
    """Shorten ascending numbers, as in "3, 7 to 12"."""
    # Within a range, the numbers grow as their places do.
    groups = itertools.groupby(enumerate(steps), lambda pair: pair[1] - pair[0])
    ranges = [[step for _, step in group] for _, group in groups]
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else f"{r[0]}" for r in ranges)


def _epochs(order: Order, end: int) -> Iterator[tuple[int, int, Counts]]:
    """Count how often the places below `end` hold each block, by corpus and epoch.

    Yields:
        Number of the corpus, epoch, count of each of its blocks. The epochs of a corpus ascend.
    """
    number = len(order.lineages)
    counts: dict[int, Counts] = {}  # by epoch x number + corpus, of the epochs that are being read
    for first in range(0, end, _CHUNK):
        blocks, epochs = order.blocks(first, min(_CHUNK, end - first))
        keys = epochs * number + np.searchsorted(order.firsts, blocks, side="right") - 1
        for key in np.unique(keys).tolist():
            epoch, corpus = divmod(key, number)
            if key not in counts:
                counts[key] = np.zeros(order.lineages[corpus].total, dtype=np.uint8)
                if epoch:  # all of the epoch before may have been skipped
                    before = counts.pop(key - number, np.zeros_like(counts[key]))
                    yield corpus, epoch - 1, before
            np.add.at(counts[key], blocks[keys == key] - order.firsts[corpus], 1)
    for key in sorted(counts):
        epoch, corpus = divmod(key, number)
        yield corpus, epoch, counts[key]
