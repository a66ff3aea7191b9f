"""What happened to a run, and what is going on: `python -m pretrain status RUN`. Imports no torch.

`story` is the run's history in plain words, from the ledger alone; the report at a run's end holds
the same words.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.run import ledger, metrics
from pretrain.run.folder import LOCK

Record = ledger.Record
_QUIET = frozenset({"created", "commit", "delete"})
"""Kinds of records that make no sentence of their own."""


def status(run: Path) -> str:
    """A page about a run's folder.

    Raises:
        ValueError: it is no run's folder, or its ledger does not verify.
    """
    path = run / ledger.FILE_NAME
    records = ledger.read(path)
    if not records or not (run / "run.yaml").is_file():
        raise ValueError(
            f"{run}: has no {ledger.FILE_NAME}; accepted: the folder of a run that was begun"
        )
    config = recipes.load(str(run / "run.yaml"))
    state = ledger.fold(records, config.training.seed)
    lines = metrics.surviving(metrics.read(run / metrics.METRICS))
    parts = [
        f"{run}: {config.model.variant} {config.model.size}, {config.training.steps:,} steps, "
        f"recipe's seed {config.training.seed}",
        now(state, lines, config, is_locked(run / LOCK)),
        *filter(None, [metrics.left_out(run)]),
        "",
        *(f"  {_clock(record['time'])}  {words}" for record, words in story(records)),
        "",
        _checkpoints(state),
    ]
    return "\n".join(parts) + "\n"


def now(
    state: ledger.RunState, lines: Sequence[Mapping[str, Any]], config: RunConfig, at_work: bool
) -> str:
    """What is going on, in a sentence or two.

    Args:
        state: of the run.
        lines: of metrics.jsonl, of the surviving steps.
        config: its recipe.
        at_work: whether an attempt is training it now.
    """
    steps = config.training.steps
    if state.done:
        attempts = metrics.count(state.attempts, "attempt")
        return f"finished: {steps:,} of {steps:,} steps in {attempts}"
    if at_work:
        progress = metrics.progress_line(lines, steps) if lines else "no step yet"
        suspicion = ""
        if state.suspected_since is not None:
            suspicion = f"\nunder suspicion of a loss spike since step {state.suspected_since}"
        return f"training now, attempt {state.next_attempt - 1}: {progress}{suspicion}"
    left = (
        f"it would go on from step {state.resume_step():,} of {steps:,} "
        "(`python -m pretrain supervise` with the same recipe)"
    )
    if state.unanswered_spike is not None:
        return f"stopped at a loss spike, not yet rolled back; {left}"
    if state.last and state.last["kind"] == "gave-up":
        return f"given up: {state.last['reason']}; {left}"
    return f"nobody is at work on it; {left}"


def is_locked(path: Path) -> bool:
    """Whether a process of this machine holds a lock file."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def story(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """Each record that is worth a sentence, and the sentence."""
    return [(record, sentence(record)) for record in records if record["kind"] not in _QUIET]


def since_last_attempt(records: Sequence[Record]) -> list[str]:
    """What was told from the end of the attempt before to the beginning of the newest one."""
    begun = [number for number, r in enumerate(records) if r["kind"] == "attempt"]
    kinds = ("crash", "hang", "preempted", "interrupted", "rollback", "attempt")
    first = begun[-2] + 1 if len(begun) > 1 else 0
    return [words for r, words in story(records[first:]) if r["kind"] in kinds]


def sentence(record: Record) -> str:
    """A record of the ledger in plain words."""
    words = _SENTENCES.get(record["kind"])
    return words(record) if words else f"{record['kind']}"


def _attempt(r: Record) -> str:
    origin = f"from the checkpoint of step {r['step']:,}" if r["step"] else "from initial weights"
    ranks = metrics.count(r["ranks"], "rank")
    return f"attempt {r['attempt']} began {origin}: {ranks}, seed {r['seed']}, {r['host']}"


def _suspect(r: Record) -> str:
    return f"suspicion at step {r['step']:,}: {_rise(r)}"


def _healed(r: Record) -> str:
    return f"healed at step {r['step']:,}: {_rise(r)}"


def _spike(r: Record) -> str:
    return f"LOSS SPIKE confirmed at step {r['step']:,}: {_rise(r)}"


def _rise(r: Record) -> str:
    """A ledger may hold null, or NaN, for a number that is not finite, or not known yet."""
    loss, baseline = metrics.finite_or_nan(r["loss"]), metrics.finite_or_nan(r["baseline"])
    words = "loss not finite" if math.isnan(loss) else f"{loss:.4g}"
    if not math.isnan(baseline):
        words += f" where {baseline:.4g} was usual"
    return f"{_CHANNELS.get(r['channel'], r['channel'])}, {words}, since step {r['onset']:,}"


_CHANNELS = {
    "non-finite": "non-finite loss or gradient",
    "loss-scale": "overflows of fp16 (loss-scale)",
}


def _rollback(r: Record) -> str:
    target = f"the checkpoint of step {r['step']:,}" if r["step"] else "the initial weights"
    words = f"rolled back to {target}, going on with seed {r['seed']}"
    if r["skip"]:
        words += (
            f", without the blocks that steps {r['skip'][0]:,} to {r['skip'][1] - 1:,} had read"
        )
    if r["learning_rate_steps"]:
        factor, end = r["learning_rate_factor"], r["step"] + r["learning_rate_steps"]
        words += f", with {factor:g} times the learning rate until step {end:,}"
    return words


_SENTENCES: Mapping[str, Callable[[Record], str]] = MappingProxyType(
    {
        "attempt": _attempt,
        "suspect": _suspect,
        "healed": _healed,
        "spike": _spike,
        "rollback": _rollback,
        "crash": lambda r: f"attempt {r['attempt']} failed: {r['reason']}",
        "hang": lambda r: f"attempt {r['attempt']} hung: {r['reason']}",
        "interrupted": lambda r: f"attempt {r['attempt']} was interrupted: {r['reason']}",
        "reject": lambda r: f"checkpoint of step {r['step']:,} rejected: {r['reason']}",
        "save-failed": lambda r: f"no checkpoint of step {r['step']:,}: {r['reason']}",
        "discontinuity": lambda r: f"WARNING, does not continue at {r['step']:,}: {r['reason']}",
        "preempted": lambda r: f"attempt {r['attempt']} stopped by request at step {r['step']:,}",
        "gave-up": lambda r: f"given up: {r['reason']}",
        "done": lambda r: f"done: {r['step']:,} steps",
    }
)


def _checkpoints(state: ledger.RunState) -> str:
    words = [
        f"{step:,}{' (tainted: after the onset)' if step in state.tainted else ''}"
        for step in state.checkpoints
    ]
    return f"checkpoints: {', '.join(words) or 'none'}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
