"""The checkpoint of a run with the lowest validation loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pretrain.records import ledger, metrics


def best_checkpoint(
    records: Sequence[ledger.Record], validation: Sequence[dict[str, Any]], seed: int
) -> metrics.Line | None:
    """Return the evaluation with the lowest loss among those of the checkpoints that are kept.

    A checkpoint after a suspected spike does not count, nor does an evaluation that measured
    something else than the newest one.

    Args:
        records: of the run's ledger.
        validation: every line of its validation.jsonl.
        seed: the recipe's.

    Returns:
        Its line, with the checkpoint's step; None if none of these checkpoints was evaluated.
    """
    state = ledger.run_state(records, seed)
    begun = [(r["attempt"], r["step"]) for r in records if r["kind"] == "attempt"]
    # The ledger says which evaluations later attempts undid: metrics.jsonl is long.
    surviving = [
        line
        for line in metrics.surviving(validation)
        if not any(line["attempt"] < n and step < line["step"] for n, step in begun)
    ]
    return metrics.best_validation(surviving, {*state.checkpoints} - {*state.tainted})
