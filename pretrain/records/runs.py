"""The runs in a folder beside each other: `python -m pretrain status FOLDER`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.common.wording import duration
from pretrain.config.load import RUN_FILE
from pretrain.records.folder import SUPERVISED
from pretrain.records.metrics import format_number
from pretrain.records.status import facts, view

_COLUMNS = ("run", "state", "steps", "loss", "validation", "tokens/s", "rollbacks", "left")


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).is_file() for name in (RUN_FILE, SUPERVISED))


def runs_in(folder: Path) -> list[Path]:
    """The runs directly in a folder, by name; none in a run's own folder."""
    if is_run(folder) or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if is_run(path))


def compare(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return `facts` of each run; of one that cannot be read, `run` and `error`."""
    found: list[dict[str, Any]] = []
    for run in runs:
        try:
            found.append(facts(view(run)))
        except ValueError as error:
            found.append({"run": str(run), "error": str(error)})
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line for each run of `compare`, its numbers to the right."""
    rows = [_COLUMNS, *(_row(values) for values in found if "error" not in values)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'<' if n < 2 else '>'}{width}}}" for n, width in enumerate(widths))
    lines = [form.format(*row) for row in rows]
    lines += [values["error"] for values in found if "error" in values]
    return "\n".join(lines) + "\n"


def _row(values: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a run; "-" for what is not known."""
    validation, eta = values["validation"], values["eta_seconds"]
    measured = bool(values["step"])
    return (
        Path(values["run"]).name,
        values["state"],
        f"{values['step']:,} of {values['steps']:,}",
        format_number(values["loss"], ".4f") if measured else "-",
        format_number(validation["loss"], ".4f") if validation else "-",
        f"{values['tokens_per_second']:,.0f}" if measured else "-",
        str(values["rollbacks"]),
        duration(eta) if eta else "-",
    )
