"""The supervisor's decisions, as pure functions of the ledger's records.

`pretrain.spikes` decides about spikes. This module decides how an attempt ended, how often attempts
may end without progress, and how long to wait before the next one. Progress is a checkpoint of a
later step than any before.
"""

import dataclasses
from collections.abc import Collection, Sequence

from data_prep.common.wording import count
from pretrain.config.run import RunConfig
from pretrain.config.sections import SupervisionConfig
from pretrain.records import failures, ledger
from pretrain.spikes import policy

CRASH, HANG, PREEMPTED = "crash", "hang", "preempted"
"""Kinds of records for the end of a launch, even one whose attempt never began."""
_MAX_PAUSE = 10.0
"""Seconds."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start the next attempt from the newest surviving checkpoint."""

    pause: float = 0.0
    """Seconds to wait before: 0 after the first failure, then 1, 2, 4, 8, 10."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """The last step is done and saved."""


Decision = Launch | Finished | policy.Rollback | policy.GiveUp


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why an attempt has to be ended, or why it ended."""

    kind: str
    """CRASH or HANG."""
    reason: str


def decide(records: Sequence[ledger.Record], config: RunConfig) -> Decision:
    """Decide what to do next while no attempt is running."""
    if ledger.run_state(records).is_done(config.training.steps):
        return Finished()
    return policy.answer_to_spike(records, config) or answer_to_endings(records, config.supervision)


def answer_to_endings(
    records: Sequence[ledger.Record], config: SupervisionConfig
) -> Launch | policy.GiveUp:
    """Decide whether to launch again after attempts that ended without progress."""
    endings = endings_without_progress(records)
    failed = len(endings)
    if failed > config.max_retries:
        return policy.GiveUp(
            f"{count(failed, 'attempt')} failed without a new checkpoint in between "
            f"(supervision.max_retries); last reason: {endings[-1]['reason']}"
        )
    return Launch(min(_MAX_PAUSE, 2.0 ** (failed - 2)) if failed > 1 else 0.0)


def endings_without_progress(records: Sequence[ledger.Record]) -> list[ledger.Record]:
    """Return the crashes and hangs since the last progress.

    A new segment, or restarting a run that was given up, resets the count. An attempt that was
    asked to stop did not fail.
    """
    endings: list[ledger.Record] = []
    furthest = 0
    for record in records:
        kind = record["kind"]
        if kind == "segment" or (kind == "commit" and record["step"] > furthest):
            endings, furthest = [], record["step"]
        elif kind == "gave-up":
            endings = []
        elif kind in (CRASH, HANG):
            endings.append(record)
    return endings


def since_fork(records: Sequence[ledger.Record]) -> list[ledger.Record]:
    """Return the records of the run itself: of a fork those after its newest fork, else all."""
    forks = [record["number"] for record in ledger.segments(records, ledger.FORK)]
    return list(records[forks[-1] + 1 :] if forks else records)


def open_attempt(records: Sequence[ledger.Record]) -> ledger.Record | None:
    """Return the newest attempt if its end is not recorded.

    Attempts before a fork are the source's.
    """
    for record in reversed(since_fork(records)):
        if record["kind"] == "attempt":
            return record
        if record["kind"] in {*ledger.ENDINGS, "spike", "done"}:
            break
    return None


def why_ended(
    problem: Problem | None,
    launcher: str,
    errors: Sequence[failures.RankError],
    hosts: Sequence[str] = (),
) -> Problem:
    """Return why an attempt ended.

    A rank's own error comes first, then the problem that the supervisor saw, then the launcher's
    exit code.

    Args:
        problem: why the supervisor ended the attempt; `None` if the launcher ended by itself.
        launcher: how the launcher ended: "ended with code 1".
        errors: of the attempt's ranks, the earliest first.
        hosts: host of each rank; empty if even their number is unknown.
    """
    explanation = failures.explain(errors, hosts)
    if failures.cause(errors):
        return Problem(CRASH, explanation)
    seen = problem or Problem(CRASH, f"the launcher {launcher} before the run was done")
    if explanation and seen.kind == CRASH:
        return Problem(CRASH, f"{explanation}; {seen.reason}")
    return seen


def ending(recorded: Collection[str], seen: str, preempting: bool) -> str:
    """Return the kind of record to add for the end of an attempt; "" if it is recorded.

    Args:
        recorded: kinds of the records that the attempt itself wrote.
        seen: the kind of problem that the supervisor saw, CRASH or HANG.
        preempting: whether it had been asked to stop.
    """
    if {*recorded} & {"done", "spike", PREEMPTED}:
        return ""
    return PREEMPTED if preempting else seen
