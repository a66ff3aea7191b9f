"""Describe the history of a run in sentences, from its ledger alone.

The status, the report, the log and the supervisor use the same sentences.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from data_prep.common.wording import count
from pretrain.records import metrics
from pretrain.records.ledger import FORK, START, USER, Record


def sentences(records: Sequence[Record]) -> list[tuple[Record, str]]:
    """Return the records that matter to a reader, each with a sentence about it."""
    shown = (r for r in records if r["kind"] not in ("commit", "delete") and r.get("why") != START)
    return [(record, describe(record)) for record in shown]


def describe(record: Record) -> str:
    """Describe a record of the ledger in a sentence."""
    sentence = _SENTENCES.get(record["kind"])
    return sentence(record) if sentence else str(record["kind"])


def suspicion(since: int | None) -> str:
    """Return the end of a sentence about a suspected run; "" if it is not suspected."""
    return "" if since is None else f", under suspicion of a loss spike since step {since:,}"


def _attempt(r: Record) -> str:
    origin = f"from the checkpoint of step {r['step']:,}" if r["step"] else "from initial weights"
    ranks = count(r["ranks"], "rank")
    return f"attempt {r['attempt']} began {origin}: {ranks}, seed {r['seed']}, on {r['host']}"


def _rise(r: Record) -> str:
    """Describe the detector's event; numbers may be null or NaN."""
    loss, baseline = metrics.finite_or_nan(r["loss"]), metrics.finite_or_nan(r["baseline"])
    text = "loss " + ("not finite" if math.isnan(loss) else f"{loss:.4g}")
    if not math.isnan(baseline):
        text += f" (usually {baseline:.4g})"
    return f"{_CHANNELS.get(r['channel'], r['channel'])} {text}, since step {r['onset']:,}"


_CHANNELS: Mapping[str, str] = {
    "fast": "fast rise,",
    "slow": "slow rise,",
    "drift": "rise over thousands of steps,",
    "gradient-norm": "raised gradient norm,",
    "loss-scale": "overflows of fp16 (loss-scale),",
    "non-finite": "non-finite loss or gradient,",
}
"""Words before the loss in a sentence; for other channels, the name."""


def _segment(r: Record) -> str:
    if r["why"] == USER:
        return f"from step {r['step']:,} on, the recipe is {r['recipe']}"
    if r["why"] == FORK:
        return f"continues as a fork of {r['run']} at step {r['step']:,}, recipe {r['recipe']}"
    target = f"the checkpoint of step {r['step']:,}" if r["step"] else "the initial weights"
    text = f"rolled back to {target}, continuing with seed {r['seed']}"
    return ", ".join((text, *rollback_changes(r)))


def rollback_changes(segment: Record) -> Iterator[str]:
    """What a rollback changes beside the seed; of other segments nothing."""
    if skip := segment.get("skip"):
        yield f"without the blocks that steps {skip[0]:,} to {skip[1] - 1:,} had read"
    if steps := segment.get("learning_rate_steps"):
        factor, end = segment["learning_rate_factor"], segment["step"] + steps
        yield f"with {factor:g} times the learning rate until step {end:,}"


_SENTENCES: Mapping[str, Callable[[Record], str]] = {
    "attempt": _attempt,
    "suspect": lambda r: f"suspicion at step {r['step']:,}: {_rise(r)}",
    "healed": lambda r: f"healed at step {r['step']:,}: {_rise(r)}",
    "new-level": lambda r: f"new level of the loss confirmed at step {r['step']:,}: {_rise(r)}",
    "spike": lambda r: f"LOSS SPIKE confirmed at step {r['step']:,}: {_rise(r)}",
    "segment": _segment,
    "crash": lambda r: f"attempt {r['attempt']} failed: {r['reason']}",
    "hang": lambda r: f"attempt {r['attempt']} hung: {r['reason']}",
    "reject": lambda r: f"checkpoint of step {r['step']:,} rejected: {r['reason']}",
    "discontinuity": lambda r: f"WARNING, does not continue at {r['step']:,}: {r['reason']}",
    "preempted": lambda r: f"attempt {r['attempt']} stopped by request at step {r['step']:,}",
    "gave-up": lambda r: f"given up: {r['reason']}",
    "done": lambda r: f"done: {r['step']:,} steps{suspicion(r.get('suspected_since'))}",
}
