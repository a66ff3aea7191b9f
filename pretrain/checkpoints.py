"""Checkpoints that exist whole or not at all.

DeepSpeed writes each rank's files straight to their names and points `latest` at them before the
other ranks are done: a crash leaves a pointer to a torn checkpoint. So the ranks write into a
staging folder, each hashes its own files, and when all have answered rank 0 writes MANIFEST.json
and renames the folder. A folder without a manifest is no checkpoint, and none is loaded before its
hashes hold: DeepSpeed unpickles what it loads.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_prep.files import fsync_folder, write_atomically

MANIFEST = "MANIFEST.json"
Fingerprints = dict[str, dict[str, object]]


def folder_of(run: Path, step: int) -> Path:
    """The checkpoint folder of a run after `step` updates."""
    return run / "checkpoints" / f"step-{step:08d}"


def save(
    run: Path,
    step: int,
    facts: Mapping[str, object],
    *,
    write: Callable[[Path], None],
    gather: Callable[[Fingerprints], list[Fingerprints]],
    rank: int,
) -> None:
    """Write and commit a checkpoint; every rank calls this after the same step.

    A rank that cannot write raises; the attempt then ends and nothing was committed.

    Args:
        run: the run's folder.
        step: updates done.
        facts: kept in the manifest beside the hashes.
        write: writes this rank's files below a folder (`Engine.save`).
        gather: every rank's value, on every rank.
        rank: this rank's number.
    """
    final = folder_of(run, step)
    staging = final.with_name(final.name + ".partial")
    if rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    gather({})  # nobody writes before the folder is clean
    write(staging)
    fingerprints = gather(
        {path.name: fingerprint(path) for path in staging.iterdir() if _owner(path) == rank}
    )
    if rank == 0:
        files = {name: value for part in fingerprints for name, value in part.items()}
        manifest = {"format": 1, "step": step, **facts, "files": files}
        write_json(staging / MANIFEST, manifest)
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
        fsync_folder(final.parent)
    gather({})  # nobody goes on before the checkpoint stands


def _owner(path: Path) -> int:
    """The rank that wrote a file of DeepSpeed's: the number after `pp_rank_`, else rank 0."""
    found = re.search(r"pp_rank_(\d+)_", path.name)
    return int(found.group(1)) if found else 0


def fingerprint(path: Path) -> dict[str, object]:
    """Size and hash of a file, after making sure that both are on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "blake2b").hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": digest}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written.

    Raises:
        ValueError: no manifest, or a file is missing, cut short or changed; the file is named.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: Fingerprints = manifest["files"]
        sizes = {name: written["bytes"] for name, written in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}: is no checkpoint, {MANIFEST} cannot be read: {error}"
        ) from None
    for name, written in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: is missing from the checkpoint")
        if path.stat().st_size != sizes[name]:
            raise ValueError(f"{path}: has {path.stat().st_size} bytes, {sizes[name]} were written")
        if fingerprint(path) != written:
            raise ValueError(f"{path}: is not what was written, its hash differs")
    return manifest


def remove(run: Path, keep: set[int]) -> list[int]:
    """Delete every checkpoint folder of a run but those of the steps in `keep`.

    Returns:
        The steps whose checkpoint is gone; left-overs of interrupted saves are not counted.
    """
    gone = []
    for folder in sorted((run / "checkpoints").glob("step-*")):
        digits = folder.name.removeprefix("step-")
        if digits.isdigit() and int(digits) in keep:
            continue
        # The manifest first: what is half deleted is no checkpoint.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
        if digits.isdigit():
            gone.append(int(digits))
    return gone


def write_json(path: Path, value: object) -> None:
    """Write JSON, complete or not at all."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())
