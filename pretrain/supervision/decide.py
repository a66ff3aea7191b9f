"""What a run's ledger asks for when no attempt is running: pure functions of its records.

Spikes have a ladder of their own (spikes/policy.py). Here: what ended an attempt, how often
that may happen without progress, and how long to wait before the next. Progress is a checkpoint of
a step that no earlier one had reached: a run that commits the same step again and again makes none.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from pretrain.config.run import RunConfig, SupervisionConfig
from pretrain.run import ledger, metrics
from pretrain.spikes import policy

CRASH, HANG, PREEMPTED, INTERRUPTED = "crash", "hang", "preempted", "interrupted"
ENDINGS = frozenset({CRASH, HANG, PREEMPTED, INTERRUPTED})
"""Kinds of records in which the supervisor says how a launch ended, whether it began or not."""
_LONGEST_PAUSE = 10.0
"""Seconds."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start the next attempt from the newest surviving checkpoint."""

    pause: float = 0.0
    """Seconds to wait before: none the first time, then 1, 2, 4, 8, 10."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """The last step is done and saved."""


Decision = Launch | Finished | policy.Rollback | policy.GiveUp


def decide(records: Sequence[ledger.Record], config: RunConfig) -> Decision:
    """What a ledger asks for, when no attempt is running."""
    if ledger.run_state(records, config.training.seed).done:
        return Finished()
    return policy.answer_to_spike(records, config) or answer_to_endings(records, config.supervision)


def answer_to_endings(
    records: Sequence[ledger.Record], config: SupervisionConfig
) -> Launch | policy.GiveUp:
    """Launch again, or not, after the attempts that ended without progress."""
    endings = endings_without_progress(records)
    kinds = [record["kind"] for record in endings]
    for name, kind, most in (
        ("crashed", CRASH, config.max_crashes),
        ("hung", HANG, config.max_hangs),
        ("stopped on request", PREEMPTED, config.max_preemptions),
    ):
        if kinds.count(kind) > most:
            what = f"{metrics.count(kinds.count(kind), 'attempt')} {name}"
            return policy.GiveUp(_in_words(what, endings, kind))
    if len(endings) > config.max_stalled:
        what = f"{metrics.count(len(endings), 'attempt')} ended"
        return policy.GiveUp(_in_words(what, endings, kinds[-1]))
    failures = len(endings) - kinds.count(PREEMPTED)
    return Launch(min(_LONGEST_PAUSE, 2.0 ** (failures - 2)) if failures > 1 else 0.0)


def _in_words(what: str, endings: Sequence[ledger.Record], kind: str) -> str:
    last = next(record for record in reversed(endings) if record["kind"] == kind)
    return f"{what} without a new checkpoint, the last one because {last['reason']}"


def endings_without_progress(records: Sequence[ledger.Record]) -> list[ledger.Record]:
    """How attempts ended since a checkpoint went further than any before.

    A rollback begins anew, and so does a person who starts a run again that was given up.
    """
    endings: list[ledger.Record] = []
    furthest = 0
    for record in records:
        kind = record["kind"]
        if kind == "rollback" or (kind == "commit" and record["step"] > furthest):
            endings, furthest = [], record["step"]
        elif kind == "gave-up":
            endings = []
        elif kind in (CRASH, HANG, PREEMPTED):
            endings.append(record)
    return endings


def records_of(records: Sequence[ledger.Record], token: str) -> list[ledger.Record]:
    """What was told since the attempt with a token began; nothing where it never did."""
    for place, record in enumerate(records):
        if record["kind"] == "attempt" and record.get("token") == token:
            return list(records[place:])
    return []


def open_attempt(records: Sequence[ledger.Record]) -> ledger.Record | None:
    """The newest attempt, if nothing in the ledger says how it ended."""
    newest = None
    for record in records:
        if record["kind"] == "attempt":
            newest = record
        elif record["kind"] in {*ENDINGS, "spike", "done"}:
            newest = None
    return newest


def ending(told: Collection[str], seen: str, preempting: bool) -> str:
    """The kind of record that says how an attempt ended; "" where it has been said.

    Args:
        told: kinds of records that the attempt itself told.
        seen: what it looked like from outside, crash or hang.
        preempting: whether it had been asked to save and leave.
    """
    if {*told} & {"done", "spike", PREEMPTED}:
        return ""
    return PREEMPTED if preempting else seen
