"""A run's results, report.md, report.html and loss.png: `python -m pretrain report RUN`.

`supervise` writes them when it ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from data_prep.common.files import write_atomically
from data_prep.common.markup import markdown_table
from data_prep.common.wording import duration
from pretrain.config.load import public
from pretrain.config.run import Phase, RunConfig
from pretrain.config.settings import flatten
from pretrain.records import ledger, metrics
from pretrain.records.diff import machine
from pretrain.records.history import sentences
from pretrain.records.metrics import Line, format_number
from pretrain.records.page import REPORT_PAGE, report_page
from pretrain.records.plots import LOSS_PLOT, plot_loss
from pretrain.records.status import (
    RunView,
    current_activity,
    describe_phases,
    view,
)
from pretrain.records.tasks import formatted

REPORT = "report.md"


def write_report(run: Path, plot: Path | None = None) -> Path:
    """Write a run's report in Markdown and as a page, and its picture; returns the first's path.

    Args:
        run: its folder.
        plot: another file to draw the losses into.

    Raises:
        ValueError: the run has no metrics yet, or its ledger does not verify.
    """
    lines = metrics.read_metrics(run / metrics.METRICS)
    if not lines:
        raise ValueError(f"{run / metrics.METRICS}: has no steps to draw")
    seen = view(run)
    for path in filter(None, (run / LOSS_PLOT, plot)):
        plot_loss(seen, path)
    state, happened = seen.state, sentences(seen.records)
    rows = {"model": f"{seen.config.model.variant} {seen.config.model.size}"}
    rows |= {"initial weights": seen.origin} if seen.origin else {}
    rows |= {"began": seen.forked} if seen.forked else {}
    rows |= {"guard, surviving steps": seen.guard_summary} if seen.guard_summary else {}
    new_levels = sum(record["kind"] == "new-level" for record in seen.records)
    rows |= costs(seen.records, lines, seen.lines)
    rows |= {
        "attempts; loss spikes; rollbacks; new levels of the loss": (
            f"{state.attempts}; {len(state.spikes)}; {len(state.rollbacks)}; {new_levels}"
        ),
        "seeds of the surviving lineage, from step": ", ".join(
            f"{seed} from {first:,}" for first, seed in state.segments
        ),
    }
    head = [f"# {run.name}", "", current_activity(seen) + ".", ""]
    picture = [f"![training and validation loss]({LOSS_PLOT})", ""]
    rest = [
        *markdown_table(("figure", "value"), rows.items()),
        *_phases(seen),
        *_corpora(seen),
        *_validation(seen.validation),
        *_tasks(seen.tasks),
        "## What happened",
        "",
        *(f"{number}. {text}" for number, (_, text) in enumerate(happened, start=1)),
        "",
        *(f"- {text}" for text in seen.pointers()),
        "",
        *_settings(seen),
        *_environment(seen),
    ]
    write_atomically(run / REPORT, "\n".join([*head, *picture, *rest]).encode())
    page = report_page(run.name, ("\n".join(head), "\n".join(rest)), seen, lines)
    write_atomically(run / REPORT_PAGE, page.encode())
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


def _phases(seen: RunView) -> list[str]:
    """What each phase changed, and how it ended."""
    if not seen.config.phases:
        return []
    phases, rows = seen.config.resolved_phases, list[Sequence[object]]()
    for phase, text in zip(phases, describe_phases(seen.config), strict=True):
        measured = _last(seen, phase)
        score = format_number(measured["loss"], ".4f") if measured else "-"
        name, _, settings = text.partition(": ")
        rows.append((name, settings, score))
    return [
        "## Phases",
        "",
        *markdown_table(("phase", "settings", "last validation loss, nats"), rows),
    ]


def _last(seen: RunView, phase: Phase) -> Line | None:
    """The last evaluation of a phase, as it measures. After its last step the next may, too."""
    within = range(phase.first_step + 1, phase.end_step + 1)
    first_of_step = {line["step"]: line for line in reversed(seen.validation)}
    return first_of_step.get(max(first_of_step.keys() & set(within), default=-1))


def _corpora(seen: RunView) -> list[str]:
    """A table of what was drawn from each corpus, and its newest validation."""
    scores: dict[str, Line] = {}
    config = seen.config
    for phase, names in zip(config.resolved_phases, config.stream_names, strict=True):
        measured = _last(seen, phase)
        for corpus, name in zip(phase.config.data.named_corpora, names, strict=True):
            if measured:
                scores[name or "corpus"] = measured.get("corpora", {}).get(corpus, measured)
    titles = (
        *("corpus", "share of a batch, last step", "blocks drawn", "epochs"),
        *("tokens that its blocks hold", "blocks skipped", "validation perplexity"),
    )
    rows = [
        (
            *(c.name, f"{c.share:.1%}", f"{c.blocks:,}", metrics.epochs(c.epochs)),
            *(f"{c.share_of_tokens:.1%}", f"{c.skipped:,}", _perplexity(scores.get(c.name))),
        )
        for c in seen.drawn
    ]
    return ["## What was read", "", *markdown_table(titles, rows)]


def _perplexity(score: Line | None) -> str:
    return format_number(score["perplexity"], ".2f") if score else "-"


def _tasks(scores: Sequence[Line]) -> list[str]:
    """A table of the scores of checkpoints on tasks; nothing without any."""
    names = ("after steps", "task", "best epoch")
    rows = [
        (f"{line['step']:,}", line["task"], ", ".join(map(" ".join, formatted(line))))
        for line in scores
    ]
    return ["## Tasks", "", *markdown_table(names, rows)] if rows else []


def _validation(measured: Sequence[Line]) -> list[str]:
    if not measured:
        return []
    newest = measured[-1]
    # A sum of several terms has no perplexity.
    terms = newest.get("terms", {})
    subsets = newest["subsets"] if len(newest["subsets"]) > 1 else {}
    rows = {"all": newest, **terms, **subsets}
    best = metrics.best_validation(measured)
    if best is not None and best is not newest:
        rows[f"all, best (after {best['step']:,} steps)"] = best
    cells = [
        (
            *(name, f"{row.get('targets', row.get('masked_tokens')):,}"),
            format_number(row["loss"], ".4f"),
            "-" if terms and name not in terms else format_number(row["perplexity"], ".2f"),
        )
        for name, row in rows.items()
    ]
    title = f"## Validation after {newest['step']:,} steps"
    return [title, "", *markdown_table(("subset", "targets", "loss, nats", "perplexity"), cells)]


def _settings(seen: RunView) -> list[str]:
    """A table of the settings that decide the weights and are not the defaults."""
    default, found = (flatten(public(config)) for config in (RunConfig(), seen.config))
    rows = [
        (f"`{key}`", f"`{value}`")
        for key, value in found.items()
        if value != default.get(key) and key != "phases"
    ]
    return (
        [
            "## Settings that differ from the defaults",
            "",
            *markdown_table(("setting", "value"), rows),
        ]
        if rows
        else []
    )


def _environment(seen: RunView) -> list[str]:
    rows = [
        (name, ", ".join(dict.fromkeys(value)) if isinstance(value, list) else value)
        for name, value in flatten(machine(seen)).items()
    ]
    return ["## Environment", "", *markdown_table(("part", "version"), rows)] if rows else []
