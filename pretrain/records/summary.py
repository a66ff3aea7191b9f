"""Statistics of a run up to a checkpoint, for exports and model cards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.manifest import load_manifest
from pretrain.config.run import RunConfig
from pretrain.records import ledger, segments
from pretrain.records.status import RunView


def summary(seen: RunView, step: int) -> dict[str, Any]:
    """Sum up the steps of a run before a checkpoint, on the surviving lineage.

    Args:
        seen: the run.
        step: of the checkpoint; 0 for the initial weights.

    Returns:
        `tokens` read, without padding; `attempts`, `loss_spikes` and `rollbacks` until then;
        `corpora`; `validation`, the newest measurement until then, if there is one; `init_from`, if
        the run continues another model (`ledger.origin`).
    """
    records = seen.records
    done = [line for line in seen.lines if line["step"] < step]
    newest = max((line["attempt"] for line in done), default=0)
    attempts = [r for r in records if r["kind"] == "attempt" and r["attempt"] <= newest]
    # A spike from before the newest of them led to it, even if its onset was at a later step.
    began = attempts[-1]["number"] if attempts else 0
    spikes = [r for r in records if r["kind"] == "spike"]
    found: dict[str, Any] = {
        "tokens": sum(line["tokens"] for line in done),
        "attempts": len(attempts),
        "loss_spikes": sum(r["number"] < began or r["onset"] < step for r in spikes),
        "rollbacks": sum(r["number"] < began for r in ledger.segments(records, ledger.SPIKE)),
        "corpora": _corpora(seen.config, records),
    }
    if before := [line for line in seen.validation if line["step"] <= step]:
        found["validation"] = {
            name: before[-1][name] for name in ("step", "loss", "perplexity", "subsets")
        }
    if origin := ledger.origin(records):
        found["init_from"] = {**origin, "path": Path(origin["path"]).name}
    return found


def _corpora(config: RunConfig, records: Sequence[ledger.Record]) -> list[dict[str, Any]]:
    """Describe the corpora; their sizes only where they are still there."""
    found = []
    paths = {source.name: Path(source.path) for source in config.segments.sources}
    for corpus in segments.corpora_of(records):
        name, digest = corpus["name"], corpus["digest"]
        path = paths.get(name, Path(name))
        facts: dict[str, Any] = {"name": name or path.name, "digest": digest}
        with contextlib.suppress(OSError, ValueError):  # it may be on another machine
            manifest = load_manifest(path)
            if manifest.digest() == digest:
                train = manifest.totals["train"]
                facts |= {"documents": train.documents, "tokens": train.tokens}
        found.append(facts)
    return found
