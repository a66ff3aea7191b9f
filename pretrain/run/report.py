"""A run's results, report.md and loss.png: `python -m pretrain report RUN`.

`supervise` writes them when it ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from data_prep.files import write_atomically
from pretrain.config.load import load
from pretrain.run import ledger, metrics
from pretrain.run.folder import LOCK
from pretrain.run.metrics import Line, duration, format_number
from pretrain.run.plots import LOSS_PLOT, plot_loss
from pretrain.run.status import current_activity, history, is_locked

REPORT = "report.md"


def write_report(run: Path) -> Path:
    """Write a run's report and its picture; returns the report's path.

    Raises:
        ValueError: the run has no metrics yet, or its ledger does not verify.
    """
    plot_loss(run)
    config = load(str(run / "run.yaml"))
    records = ledger.read(run / ledger.FILE_NAME)
    lines = metrics.read(run / metrics.METRICS)
    surviving = metrics.surviving(lines)
    validation = metrics.read(run / metrics.VALIDATION)
    state = ledger.run_state(records, config.training.seed)
    rows = {"model": f"{config.model.variant} {config.model.size}"}
    rows |= costs(records, lines, surviving)
    rows |= {
        "attempts; loss spikes; rollbacks": (
            f"{state.attempts}; {len(state.spikes)}; {len(state.rollbacks)}"
        ),
        "seeds of the surviving lineage, from step": ", ".join(
            f"{seed} from {first:,}" for first, seed in state.segments
        ),
    }
    text = "\n".join(
        [
            f"# {run.name}",
            "",
            current_activity(state, surviving, config, is_locked(run / LOCK)) + ".",
            "",
            f"![training and validation loss]({LOSS_PLOT})",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows.items()),
            "",
            *_validation(metrics.surviving_validation(validation, surviving)),
            "## What happened",
            "",
            *(f"{number}. {text}" for number, (_, text) in enumerate(history(records), start=1)),
            "",
        ]
    )
    write_atomically(run / REPORT, text.encode())
    return run / REPORT


def costs(
    records: Sequence[ledger.Record], lines: Sequence[Line], surviving: Sequence[Line]
) -> dict[str, str]:
    """Rows of the report about what a run took, and how much of it was lost.

    Args:
        records: of its ledger.
        lines: of metrics.jsonl, at least one.
        surviving: those of the surviving steps.
    """
    lost = len(lines) - len(surviving)
    elapsed = records[-1]["time"] - records[0]["time"]
    speed = statistics.median_high(line["tokens"] / line["seconds"] for line in surviving)
    return {
        "tokens read by the surviving steps": f"{sum(line['tokens'] for line in surviving):,}",
        "tokens/s, median": f"{speed:,.0f}",
        "steps done, of them lost to rollbacks and crashes": (
            f"{len(lines):,}, {lost:,} ({lost / len(lines):.1%})"
        ),
        "time from begin to end, of it in steps": (
            f"{duration(elapsed)}, {duration(sum(line['seconds'] for line in lines))}"
        ),
    }


def _validation(measured: Sequence[Line]) -> list[str]:
    if not measured:
        return []
    newest = measured[-1]
    rows = {"all": newest, **(newest["subsets"] if len(newest["subsets"]) > 1 else {})}
    return [
        f"## Validation after {newest['step']:,} steps",
        "",
        "| subset | targets | loss, nats | perplexity |",
        "|---|---|---|---|",
        *(
            f"| {name} | {row.get('targets', row.get('masked_tokens')):,} | "
            f"{format_number(row['loss'], '.4f')} | "
            f"{format_number(row['perplexity'], '.2f')} |"
            for name, row in rows.items()
        ),
        "",
    ]
