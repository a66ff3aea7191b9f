"""A run that branches off another run's checkpoint (`fork_from` in a recipe).

The new run's folder gets what the source had when it committed the checkpoint: the records of its
ledger up to then, its measurements, and the checkpoint. So the fork has the source's optimizer
state, order of blocks, seeds and numbers of steps, its detector knows the losses before, and
`audit` proves all of its steps. The recipe may differ as that of a run that is resumed at the step.
The source is only read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from data_prep.common import files
from pretrain.config.load import RUN_FILE, dump, from_dict
from pretrain.config.run import RunConfig
from pretrain.records import checkpoints, folder, ledger, metrics


@dataclasses.dataclass(frozen=True)
class Fork:
    """A fork that was not taken yet."""

    run: Path
    """The source's folder."""
    step: int
    records: list[ledger.Record]
    """Of the source's ledger, up to the commit of the checkpoint."""
    recipe: RunConfig
    """The public part of the source's when it saved the checkpoint."""
    copied: Collection[Path]
    """What a call of `take` that was interrupted may have left in the fork's folder."""


def find(config: RunConfig) -> Fork | None:
    """Return the fork that a recipe asks for; None if it asks for none, or it was taken.

    Raises:
        ValueError: the run has begun in another way; or the source is no run, or does not have the
            checkpoint; the steps that it has are named.
    """
    wanted, own = config.fork_from, Path(config.folder)
    if not wanted.run:
        return None
    run = Path(wanted.run).resolve()
    mine = ledger.read_ledger(own / ledger.FILE_NAME)
    if ledger.created(mine) is not None:
        began = forked(mine)
        if began is None or (began["run"], began["step"]) != (str(run), wanted.step):
            how = describe(began) if began else "from initial weights"
            raise ValueError(
                f"fork_from: {own} is a run that began {how}; use another folder or remove "
                "fork_from"
            )
        return None
    if run == own.resolve():
        raise ValueError(f"fork_from.run: {wanted.run} is the run's own folder; name a new folder")
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    if ledger.created(records) is None:
        raise ValueError(f"fork_from.run: {wanted.run} is not the folder of a run that has begun")
    kept = ledger.run_state(records, config.training.seed).checkpoints
    if wanted.step not in kept:
        steps = ", ".join(map(str, kept)) or "none"
        raise ValueError(
            f"fork_from.step: {wanted.run} has no checkpoint of step {wanted.step}; it kept {steps}"
        )
    end = max(
        number
        for number, record in enumerate(records)
        if record["kind"] == "commit" and record["step"] == wanted.step
    )
    manifest = checkpoints.read_manifest(checkpoints.folder_of(run, wanted.step))
    source = f"the recipe in the checkpoint of step {wanted.step} of {wanted.run}"
    copied = (checkpoints.folder_of(own, wanted.step), own / metrics.METRICS)
    recipe = from_dict(manifest["recipe"], source)
    return Fork(run, wanted.step, records[: end + 1], recipe, copied)


def take(config: RunConfig) -> None:
    """Copy what a fork begins with into its folder, unless that was done.

    The ledger comes last: without it, the next call begins again.

    Raises:
        ValueError: as `find`; or the source changed meanwhile.
    """
    fork = find(config)
    if fork is None:
        return
    own, attempt = Path(config.folder), fork.records[-1]["attempt"]
    checkpoint = checkpoints.folder_of(own, fork.step)
    shutil.rmtree(checkpoint.parent, ignore_errors=True)
    shutil.copytree(checkpoints.folder_of(fork.run, fork.step), checkpoint)
    checkpoints.read_manifest(checkpoint)
    digest = checkpoints.manifest_hash(own, fork.step)
    if digest != fork.records[-1]["manifest"]:
        raise ValueError(
            f"{fork.run}: its checkpoint of step {fork.step} is not as it was committed"
        )
    if (fork.run / folder.INITIAL).is_dir():
        shutil.copytree(fork.run / folder.INITIAL, own / folder.INITIAL, dirs_exist_ok=True)
    for name, last in ((metrics.METRICS, fork.step - 1), (metrics.VALIDATION, fork.step)):
        _copy_lines(fork.run / name, own / name, _until(attempt, last))
    dump(config, own / RUN_FILE)
    path = own / ledger.FILE_NAME
    new = path.with_suffix(".fork")
    new.unlink(missing_ok=True)
    _copy_lines(fork.run / ledger.FILE_NAME, new, lambda r: r["number"] < len(fork.records))
    ledger.append(new, "fork", run=str(fork.run), step=fork.step, manifest=digest)
    os.replace(new, path)
    files.fsync(own)


def take_alone(config: RunConfig) -> None:
    """The same without an attempt: the supervisor should not tell the source's past as news.

    Raises:
        ValueError: as `take`; or an attempt trains the run.
    """
    if find(config):
        with folder.lock(Path(config.folder)):
            take(config)


def forked(records: Sequence[ledger.Record]) -> ledger.Record | None:
    """Return the record of a run's newest fork; None if it is not one."""
    return next((record for record in reversed(records) if record["kind"] == "fork"), None)


def describe(record: ledger.Record) -> str:
    """Say where a fork began."""
    return f"as a fork of {record['run']} at step {record['step']:,}"


def _until(attempt: int, step: int) -> Callable[[dict[str, Any]], bool]:
    """Whether a line is of earlier attempts, or of this one up to a step."""
    return lambda line: (line["attempt"], line["step"]) <= (attempt, step)


def _copy_lines(source: Path, target: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Copy the JSON lines that are wanted, byte by byte."""
    kept = []
    for line in source.read_bytes().splitlines(keepends=True) if source.exists() else ():
        with contextlib.suppress(ValueError):  # a torn or damaged line
            if wanted(json.loads(line)):
                kept.append(line.removesuffix(b"\n") + b"\n")  # the last one may lack it
    files.write_atomically(target, b"".join(kept))
