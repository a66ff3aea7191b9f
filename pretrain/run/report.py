"""What a run came to: `python -m pretrain report RUN` writes report.md and loss.png into it.

`supervise` writes them whenever it ends. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.files import write_atomically
from pretrain.config import load as recipes
from pretrain.run import ledger, metrics
from pretrain.run.folder import LOCK
from pretrain.run.plots import LOSS_PLOT, plot_loss
from pretrain.run.status import is_locked, now, story

REPORT = "report.md"
Line = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What training took, and how much of it was thrown away."""

    steps: int
    """That were done."""
    lost_steps: int
    """Of them, those that are not part of the run's end: done again, or abandoned."""
    seconds: float
    """In steps."""
    elapsed_seconds: float
    """From the first record to the last."""
    tokens: int
    """Of the surviving steps."""
    tokens_per_second: float
    """Median over the surviving steps."""


def cost(
    records: Sequence[ledger.Record], lines: Sequence[Line], surviving: Sequence[Line]
) -> Cost:
    """What a run took.

    Args:
        records: of its ledger.
        lines: of metrics.jsonl.
        surviving: those of the surviving steps.
    """
    speeds = sorted(line["tokens"] / line["seconds"] for line in surviving)
    return Cost(
        steps=len(lines),
        lost_steps=len(lines) - len(surviving),
        seconds=sum(line["seconds"] for line in lines),
        elapsed_seconds=records[-1]["time"] - records[0]["time"],
        tokens=sum(line["tokens"] for line in surviving),
        tokens_per_second=speeds[len(speeds) // 2] if speeds else 0.0,
    )


def write_report(run: Path) -> Path:
    """Write a run's report and its picture; returns the report's path.

    Raises:
        ValueError: the run has no metrics yet, or its ledger does not verify.
    """
    plot_loss(run)
    config = recipes.load(str(run / "run.yaml"))
    records = ledger.read(run / ledger.FILE_NAME)
    lines = metrics.read(run / metrics.METRICS)
    surviving = metrics.surviving(lines)
    validation = metrics.read(run / metrics.VALIDATION)
    state = ledger.fold(records, config.training.seed)
    taken = cost(records, lines, surviving)
    told = [words for _, words in story(records)]
    text = "\n".join(
        [
            f"# {run.name}",
            "",
            now(state, surviving, config, is_locked(run / LOCK)) + ".",
            "",
            f"![training and validation loss]({LOSS_PLOT})",
            "",
            *_table(config.model.variant, config.model.size, state, taken),
            "",
            *_validation(metrics.surviving_validation(validation, surviving)),
            "## What happened",
            "",
            *(f"{number}. {words}" for number, words in enumerate(told, start=1)),
            "",
        ]
    )
    write_atomically(run / REPORT, text.encode())
    return run / REPORT


def _table(variant: str, size: str, state: ledger.RunState, taken: Cost) -> list[str]:
    share = taken.lost_steps / taken.steps if taken.steps else 0.0
    rows = {
        "model": f"{variant} {size}",
        "tokens read by the surviving steps": f"{taken.tokens:,}",
        "tokens/s, median": f"{taken.tokens_per_second:,.0f}",
        "steps done, of them lost to rollbacks and crashes": (
            f"{taken.steps:,}, {taken.lost_steps:,} ({share:.1%})"
        ),
        "time from begin to end, of it in steps": (
            f"{metrics.duration(taken.elapsed_seconds)}, {metrics.duration(taken.seconds)}"
        ),
        "attempts; loss spikes; rollbacks": (
            f"{state.attempts}; {len(state.spikes)}; {len(state.rollbacks)}"
        ),
        "seeds of the surviving lineage, from step": ", ".join(
            f"{seed} from {first:,}" for first, seed in state.segments
        ),
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _validation(measured: Sequence[Line]) -> list[str]:
    if not measured:
        return []
    newest = measured[-1]
    subsets = newest["subsets"] if len(newest["subsets"]) > 1 else {}
    rows = {"all": newest, **subsets}
    return [
        f"## Validation after {newest['step']:,} steps",
        "",
        "| subset | targets | loss, nats | perplexity |",
        "|---|---|---|---|",
        *(
            f"| {name} | {row.get('targets', row.get('masked_tokens')):,} | "
            f"{metrics.figure(row['loss'], '.4f')} | {metrics.figure(row['perplexity'], '.2f')} |"
            for name, row in rows.items()
        ),
        "",
    ]
