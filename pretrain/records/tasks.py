"""tasks.jsonl: scores of a run's checkpoints on tasks, which the supervisor measures.

It has a line for each checkpoint and task, with `step`, `manifest` (the hash that the ledger has of
the checkpoint), `task` and `scores` by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrain.records import ledger, metrics

FOLDER = "evaluation"
"""Of logs and results, in the run's folder."""


def surviving_scores(run: Path, records: Sequence[ledger.Record]) -> list[dict[str, Any]]:
    """Return the lines about checkpoints of the surviving lineage, in the order of their steps.

    Args:
        run: its folder.
        records: of its ledger.
    """
    manifests: dict[int, str] = {}
    for record in records:
        if record["kind"] == "commit":
            manifests[record["step"]] = record.get("manifest", "")
        elif record["kind"] in ("attempt", "rollback"):
            manifests = {s: digest for s, digest in manifests.items() if s <= record["step"]}
    lines = metrics.read_metrics(run / metrics.TASKS)
    lines = [line for line in lines if line["manifest"] == manifests.get(line["step"])]
    return sorted(lines, key=lambda line: int(line["step"]))


def described(lines: Sequence[metrics.Line]) -> str:
    """Describe the scores of a checkpoint in a sentence; of several, those of the last one."""
    step = lines[-1]["step"]
    scores = "; ".join(
        f"{line['task']}: {', '.join(f'{n} {v}' for n, v in formatted(line))}"
        for line in lines
        if line["step"] == step
    )
    return f"tasks after {step:,} steps: {scores}"


def formatted(line: metrics.Line) -> Iterator[tuple[str, str]]:
    """Yield the name of each score and its value in words."""
    for name, value in line["scores"].items():
        yield name, metrics.format_number(value, ".4f")
