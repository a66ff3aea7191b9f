"""Write a run's report.md and the plots of its losses (`status --report`).

`supervise` writes them when it ends.
"""

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from data_prep.common.files import write_atomically
from data_prep.common.markup import markdown_table
from data_prep.common.wording import duration
from pretrain.config.load import public
from pretrain.config.run import RunConfig
from pretrain.config.settings import flatten
from pretrain.records import metrics
from pretrain.records.diff import machine
from pretrain.records.metrics import Line
from pretrain.records.plots import LOSS_PLOTS, plot_loss
from pretrain.records.status import RunView, describe_run, view
from pretrain.records.wording import format_number

REPORT = "report.md"


def write_report(run: Path) -> Path:
    """Write the report and the pictures of the run in a folder; returns the report's path.

    Raises:
        ValueError: as `view`, or the run has no metrics yet.
    """
    seen = view(run)
    if not seen.lines:
        raise ValueError(f"{run / metrics.METRICS}: has no steps to draw")
    plot_loss(seen)
    text = [
        f"# {run.resolve().name}",
        "",
        textwrap.indent(describe_run(seen), "    "),  # as code: a crash may tell anything
        f"![training and validation loss]({LOSS_PLOTS[0]})",
        "",
        *markdown_table(("figure", "value"), costs(seen).items()),
        *_validation(seen.validation),
        *_settings(seen),
        *_environment(seen),
    ]
    write_atomically(run / REPORT, "\n".join(text).encode())
    return run / REPORT


def costs(seen: RunView) -> dict[str, str]:
    """Return the rows of the report about the cost of a run, and what was lost and why.

    Args:
        seen: the run, with at least one step.
    """
    lines, state = seen.all_lines, seen.state
    new_levels = sum(record["kind"] == "new-level" for record in seen.records)
    lost = len(lines) - len(seen.lines)
    elapsed = seen.records[-1]["time"] - seen.records[0]["time"]
    speed = statistics.median(line["tokens"] / line["seconds"] for line in seen.lines)
    return {
        "tokens read by the surviving steps": f"{sum(line['tokens'] for line in seen.lines):,}",
        "tokens/s, median": f"{speed:,.0f}",
        "steps computed; lost to rollbacks and crashes": (
            f"{len(lines):,}; {lost:,} ({lost / len(lines):.1%})"
        ),
        "elapsed time; spent in steps": (
            f"{duration(elapsed)}; {duration(sum(line['seconds'] for line in lines))}"
        ),
        "attempts; loss spikes; rollbacks; new levels of the loss": (
            f"{state.attempts}; {len(state.spikes)}; {len(state.rollbacks)}; {new_levels}"
        ),
    }


def _validation(measured: Sequence[Line]) -> list[str]:
    """A table of the newest evaluation, by term, subset and corpus, and of the best one."""
    if not measured:
        return []
    newest = measured[-1]
    # A sum of several terms has no perplexity.
    terms = newest.get("terms", {})
    subsets = newest["subsets"] if len(newest["subsets"]) > 1 else {}
    rows = [("all", newest)]
    for found in (terms, subsets, newest.get("corpora", {})):
        rows += found.items()
    best = metrics.best_validation(measured)
    if best is not None and best is not newest:
        rows.append((f"all, best (after {best['step']:,} steps)", best))
    cells = [
        (
            *(name, f"{row['targets']:,}"),
            format_number(row["loss"], ".4f"),
            "-" if terms and name not in terms else format_number(row["perplexity"], ".2f"),
        )
        for name, row in rows
    ]
    title = f"## Validation after {newest['step']:,} steps"
    return [title, "", *markdown_table(("subset", "targets", "loss, nats", "perplexity"), cells)]


def _settings(seen: RunView) -> list[str]:
    """A table of the settings that determine the weights and differ from the defaults."""
    default, found = (flatten(public(config)) for config in (RunConfig(), seen.config))
    rows = [
        (f"`{key}`", f"`{value}`")
        for key, value in found.items()
        if value != default.get(key) and key != "phases"
    ]
    title = "## Settings that differ from the defaults"
    return [title, "", *markdown_table(("setting", "value"), rows)] if rows else []


def _environment(seen: RunView) -> list[str]:
    rows = [
        (name, ", ".join(dict.fromkeys(value)) if isinstance(value, list) else value)
        for name, value in flatten(machine(seen)).items()
    ]
    return ["## Environment", "", *markdown_table(("part", "version"), rows)] if rows else []
