"""What happened to a run and what it is doing: `python -m pretrain status RUN`.

`history` tells it in sentences, from the ledger alone; the report and the supervisor use the same
sentences.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pretrain.config.load import load
from pretrain.config.run import RunConfig
from pretrain.run import ledger, metrics
from pretrain.run.folder import LOCK
from pretrain.run.ledger import Record


def describe_run(run: Path) -> str:
    """Describe a run's folder on a page.

    Raises:
        ValueError: it is not a run's folder, or its ledger does not verify.
    """
    records = ledger.read(run / ledger.FILE_NAME)
    if not records or not (run / "run.yaml").is_file():
        raise ValueError(
            f"{run}: has no {ledger.FILE_NAME}; accepted: the folder of a run that has begun"
        )
    config = load(str(run / "run.yaml"))
    state = ledger.run_state(records, config.training.seed)
    lines = metrics.surviving(metrics.read(run / metrics.METRICS))
    checkpoints = ", ".join(
        f"{step:,}{' (tainted: after the onset)' if step in state.tainted else ''}"
        for step in state.checkpoints
    )
    parts = [
        f"{run}: {config.model.variant} {config.model.size}, {config.training.steps:,} steps, "
        f"recipe's seed {config.training.seed}",
        current_activity(state, lines, config, is_locked(run / LOCK)),
        *filter(None, [metrics.invalid_lines(run)]),
        "",
        *(f"  {_clock(record['time'])}  {text}" for record, text in history(records)),
        "",
        f"checkpoints: {checkpoints or 'none'}",
    ]
    return "\n".join(parts) + "\n"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def current_activity(
    state: ledger.RunState, lines: Sequence[metrics.Line], config: RunConfig, training: bool
) -> str:
    """Say in a sentence or two what a run is doing.

    Args:
        state: of the run.
        lines: the lines of metrics.jsonl for the surviving steps.
        config: the run's recipe.
        training: whether an attempt trains it now.
    """
    steps = config.training.steps
    if state.is_done(steps):
        attempts = metrics.count(state.attempts, "attempt")
        return f"finished: {steps:,} of {steps:,} steps in {attempts}"
    if training:
        progress = metrics.progress_line(lines, steps) if lines else "no step yet"
        suspicion = ""
        if state.suspected_since is not None:
            suspicion = f"\nunder suspicion of a loss spike since step {state.suspected_since}"
        return f"training now, attempt {state.next_attempt - 1}: {progress}{suspicion}"
    rest = (
        f"it would continue from step {state.resume_step():,} of {steps:,} "
        "(`python -m pretrain supervise` with the same recipe)"
    )
    if state.unanswered_spike is not None:
        return f"stopped at a loss spike, not yet rolled back; {rest}"
    if state.last and state.last["kind"] == "gave-up":
        return f"given up: {state.last['reason']}; {rest}"
    return f"not being trained; {rest}"


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


def history(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """Return the records that matter to a reader, each with a sentence about it."""
    routine = ("created", "commit", "delete")
    return [(record, describe(record)) for record in records if record["kind"] not in routine]


def since_last_attempt(records: Sequence[Record]) -> list[str]:
    """Sentences about what happened between the beginnings of the last two attempts."""
    begun = [number for number, r in enumerate(records) if r["kind"] == "attempt"]
    kinds = ("crash", "hang", "preempted", "interrupted", "rollback", "attempt")
    first = begun[-2] + 1 if len(begun) > 1 else 0
    return [text for r, text in history(records[first:]) if r["kind"] in kinds]


def describe(record: Record) -> str:
    """Describe a record of the ledger in a sentence."""
    sentence = _SENTENCES.get(record["kind"])
    return sentence(record) if sentence else str(record["kind"])


def _attempt(r: Record) -> str:
    origin = f"from the checkpoint of step {r['step']:,}" if r["step"] else "from initial weights"
    ranks = metrics.count(r["ranks"], "rank")
    share = f", {r['share_of_tokens']:.1%} of the corpus's tokens" if "share_of_tokens" in r else ""
    return f"attempt {r['attempt']} began {origin}: {ranks}, seed {r['seed']}, {r['host']}{share}"


def _rise(r: Record) -> str:
    """Describe what the detector saw; numbers may be null, or NaN in ledgers of old versions."""
    loss, baseline = metrics.finite_or_nan(r["loss"]), metrics.finite_or_nan(r["baseline"])
    text = "loss not finite" if math.isnan(loss) else f"{loss:.4g}"
    if not math.isnan(baseline):
        text += f" where {baseline:.4g} was usual"
    channel = {
        "non-finite": "non-finite loss or gradient",
        "loss-scale": "overflows of fp16 (loss-scale)",
    }.get(r["channel"], r["channel"])
    return f"{channel}, {text}, since step {r['onset']:,}"


def _rollback(r: Record) -> str:
    target = f"the checkpoint of step {r['step']:,}" if r["step"] else "the initial weights"
    text = f"rolled back to {target}, going on with seed {r['seed']}"
    if r["skip"]:
        text += f", without the blocks that steps {r['skip'][0]:,} to {r['skip'][1] - 1:,} had read"
    if r["learning_rate_steps"]:
        factor, end = r["learning_rate_factor"], r["step"] + r["learning_rate_steps"]
        text += f", with {factor:g} times the learning rate until step {end:,}"
    return text


_SENTENCES: Mapping[str, Callable[[Record], str]] = MappingProxyType(
    {
        "attempt": _attempt,
        "suspect": lambda r: f"suspicion at step {r['step']:,}: {_rise(r)}",
        "healed": lambda r: f"healed at step {r['step']:,}: {_rise(r)}",
        "spike": lambda r: f"LOSS SPIKE confirmed at step {r['step']:,}: {_rise(r)}",
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
