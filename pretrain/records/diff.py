"""Compare two runs: `zeroclap diff RUN RUN`."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.files import naming_damage, strict_json
from data_prep.common.markup import text_table
from data_prep.common.wording import changes
from pretrain.config.settings import flatten
from pretrain.records import metrics, segments
from pretrain.records.control import read_json
from pretrain.records.folder import ENVIRONMENT
from pretrain.records.metrics import Line
from pretrain.records.status import RunView, view
from pretrain.records.wording import format_number

Difference = tuple[str, str, str]
"""A name and its two values."""


def describe_differences(first: Path, second: Path) -> str:
    """Return a table of the differences between two runs.

    Args:
        first: folder of a run.
        second: of the other one.

    Raises:
        ValueError: one of them is not a run's folder, or its ledger does not verify.
    """
    runs = view(first), view(second)
    sections: dict[str, list[Difference]] = {
        title: list(_differing(*map(values, runs)))
        for title, values in (("settings", _settings), ("data", _data), ("environment", machine))
    }
    sections["losses"] = [*_differing(*map(_results, runs)), *_where_both_are(*runs)]
    if not any(sections.values()):
        return f"{first} and {second}: nothing differs\n"
    rows: list[Difference] = []
    for title, found in sections.items():
        rows.append((title if found else f"{title}: no difference", "", ""))
        rows += [(f"  {name}", one, other) for name, one, other in found]
    return "\n".join(text_table(("", str(first), str(second)), rows)) + "\n"


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the names whose values differ; "-" stands for one that only the other run has."""
    shown = ({name: _shown(value) for name, value in values.items()} for values in (first, second))
    for name, one, other in changes(*shown):
        yield name, one or "-", other or "-"


def _shown(value: object) -> str:
    return value if value and isinstance(value, str) else strict_json(value)


def _settings(seen: RunView) -> dict[str, Any]:
    """The settings by dotted name, without the folder; phases by number."""
    values = dataclasses.asdict(seen.config)
    del values["folder"]
    phases = enumerate(values["phases"], start=1)
    numbered = {str(n): {k: v for k, v in phase.items() if v} for n, phase in phases}
    return flatten(values | {"phases": numbered})


def _data(seen: RunView) -> dict[str, str]:
    """Digest and share of each corpus; nothing before the first attempt."""
    found = {
        f"{corpus['name'] or 'corpus'}, digest": corpus["digest"][:16]
        for corpus in segments.corpora_of(seen.records)
    }
    return found | {f"{c.name}, share of a batch": f"{c.share:.1%}" for c in seen.drawn}


def machine(seen: RunView) -> dict[str, Any]:
    """Versions, devices and ranks of the newest attempt."""
    newest = next((r for r in reversed(seen.records) if r["kind"] == "attempt"), {})
    found = read_json(seen.folder / ENVIRONMENT) or {}  # the ledger has the versions as well
    found.pop("started", None)
    with naming_damage(seen.folder / ENVIRONMENT):
        versions = {**found.pop("versions", {}), **newest.get("versions", {})}
    return {**versions, **found, **{k: newest[k] for k in ("ranks", "hosts") if k in newest}}


def _results(seen: RunView) -> dict[str, Any]:
    """Progress and losses of the run."""
    newest = seen.validation[-1] if seen.validation else None
    return {
        "steps": f"{len(seen.lines):,}",
        "tokens": f"{sum(line['tokens'] for line in seen.lines):,}",
        "spikes": len(seen.state.spikes),
        "rollbacks": len(seen.state.rollbacks),
        "validation id": (newest or {}).get("validation_id", "-"),
        "last validation loss": _measured(newest),
        "best validation loss": _measured(metrics.best_validation(seen.validation)),
    }


def _measured(line: Line | None) -> str:
    return f"{format_number(line['loss'], '.4f')} after {line['step']:,}" if line else "-"


def _where_both_are(first: RunView, second: RunView) -> Iterator[Difference]:
    """Yield the losses at the first and the last step of both runs where they differ."""
    found = _different_losses(first.lines, second.lines)
    for step, one, other in found[:1]:
        yield f"training loss, step {step:,} (the first that differs)", one, other
    for step, one, other in found[1:][-1:]:
        yield f"training loss, step {step:,}", one, other
    for step, one, other in _different_losses(first.validation, second.validation)[-1:]:
        yield f"validation loss after {step:,}", one, other


def _different_losses(*runs: Sequence[Line]) -> list[tuple[int, str, str]]:
    """Steps with two losses, with all digits, as these may differ in the last one alone."""
    one, other = ({line["step"]: strict_json(line["loss"]) for line in run} for run in runs)
    steps = sorted(one.keys() & other.keys())
    return [(step, one[step], other[step]) for step in steps if one[step] != other[step]]
