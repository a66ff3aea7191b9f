"""Checkpoints that exist whole or not at all.

DeepSpeed writes each rank's files straight to their names and points `latest` at them before the
other ranks are done: a crash leaves a pointer to a torn checkpoint. So the ranks write into a
staging folder, each hashes its own files, and when all have answered rank 0 writes MANIFEST.json
and renames the folder. A folder without a manifest is no checkpoint, and none is loaded before its
hashes hold: DeepSpeed unpickles what it loads.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from data_prep import files
from data_prep.files import fsync_folder, write_atomically
from data_prep.records import check_format

MANIFEST = "MANIFEST.json"
FORMAT_VERSION = 3
"""Of the manifest, which also says `format` in place of `format_version`."""
BYTES_PER_PARAMETER = 16
"""Most that a checkpoint takes: the weights as trained, and in fp32 with Adam's two moments."""
FAILED_SAVES = 3
"""In a row: so many end the attempt."""

Fingerprints = dict[str, dict[str, object]]
Gather = Callable[[Any], list[Any]]
"""Every rank's value, on every rank, in rank order."""
T = TypeVar("T")


class Failure(Exception):
    """What failed on some rank and so counts as failed on all: every rank raises it."""


class Damaged(ValueError):
    """A file of a checkpoint is proven to be another than was written."""


def together(action: Callable[[], T], gather: Gather) -> list[T]:
    """What `action` returns on every rank; none goes on before all are done.

    Raises:
        Failure: on every rank alike, where any could not write, or refused; with the reasons.
    """
    value, reason = None, ""
    try:
        value = action()
    except (OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
    answers = gather((value, reason))
    reasons = [reason for _, reason in answers]
    if any(reasons):
        raise Failure(_in_words(reasons))
    return [value for value, _ in answers]


def _in_words(reasons: Sequence[str]) -> str:
    """Each reason once, with the ranks that gave it where these are not all."""
    words = []
    for reason in dict.fromkeys(filter(None, reasons)):
        ranks = [str(rank) for rank, other in enumerate(reasons) if other == reason]
        words.append(
            reason if len(ranks) == len(reasons) else f"{reason} (rank {', '.join(ranks)})"
        )
    return "; ".join(words)


def folder_of(run: Path, step: int) -> Path:
    """The checkpoint folder of a run after `step` updates."""
    return run / "checkpoints" / f"step-{step:08d}"


def save(
    run: Path,
    step: int,
    facts: Mapping[str, object],
    *,
    write: Callable[[Path], None],
    gather: Gather,
    rank: int,
    token: str = "",
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Write and commit a checkpoint; every rank calls this after the same step.

    Args:
        run: the run's folder.
        step: updates done.
        facts: kept in the manifest beside the hashes.
        write: writes this rank's files below a folder (`Engine.save`).
        gather: every rank's value, on every rank.
        rank: this rank's number.
        token: of the attempt; keeps its staging folder apart from that of one that is over.
        before_commit: asked on rank 0 when all is written; raises where it must not be committed.

    Raises:
        Failure: on every rank; nothing was committed, and what was written is removed.
    """
    final = folder_of(run, step)
    staging = final.with_name(f"{final.name}{token and '.'}{token}.partial")

    def prepare() -> None:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    def write_own() -> Fingerprints:
        write(staging)
        return {path.name: fingerprint(path) for path in staging.iterdir() if _owner(path) == rank}

    def commit() -> None:
        if rank == 0:
            before_commit()
            fingerprints = {name: value for part in parts for name, value in part.items()}
            manifest = {"format_version": FORMAT_VERSION, "step": step, **facts}
            manifest["files"] = fingerprints
            write_json(staging / MANIFEST, manifest)  # its folder is on disk after this
            _replace(final, staging)

    try:
        together(prepare, gather)
        parts = together(write_own, gather)
        together(commit, gather)
    except Failure:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)  # gives a full disk its space back
        raise


def _replace(final: Path, staging: Path) -> None:
    """Give a finished checkpoint its name, in place of an older one of the same step."""
    shutil.rmtree(final, ignore_errors=True)
    if final.exists():  # a file in it cannot be deleted now: `remove` tries again
        final.rename(final.with_name(f"{final.name}.{secrets.token_hex(8)}.old"))
    staging.rename(final)
    fsync_folder(final.parent)


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


def may_go_on(failed_saves: int, has_checkpoint: bool, last: bool) -> bool:
    """Whether training goes on after a failed save.

    It does as long as little would be lost: there is an older checkpoint, and the disk may yet be
    given space. Not after the last step, for there is no later save to make it good.

    Args:
        failed_saves: in a row, this one included.
        has_checkpoint: whether an older one is there.
        last: whether this was the run's last save.
    """
    return failed_saves < FAILED_SAVES and has_checkpoint and not last


def read_manifest(folder: Path, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written.

    Args:
        folder: the checkpoint.
        part: of `parts`, where ranks share the hashing: every file's size is compared, and the hash
            of each `parts`-th.
        parts: how many share.

    Raises:
        Damaged: a file is cut short or changed; the file is named.
        ValueError: no valid manifest, or a file is missing; the file is named.
        OSError: a file cannot be read, which proves nothing; it was tried several times.
    """
    try:
        data = files.retried((folder / MANIFEST).read_bytes)
        manifest: dict[str, Any] = json.loads(data)
        fingerprints: Fingerprints = manifest["files"]
        sizes = {name: written["bytes"] for name, written in fingerprints.items()}
        version = manifest.get("format_version") or manifest["format"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}: is no checkpoint, {MANIFEST} cannot be read: {error}"
        ) from None
    check_format(version, FORMAT_VERSION, folder / MANIFEST, oldest=FORMAT_VERSION)
    try:
        for name, size in sizes.items():
            found = files.retried((folder / name).stat).st_size
            if found != size:
                raise Damaged(f"{folder / name}: has {found} bytes, {size} were written")
        for name in sorted(fingerprints)[part::parts]:
            if files.retried(partial(fingerprint, folder / name)) != fingerprints[name]:
                raise Damaged(f"{folder / name}: is not what was written, its hash differs")
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: is missing from the checkpoint") from None
    return manifest


@dataclasses.dataclass(frozen=True)
class Newest:
    """Where a run can go on."""

    step: int
    """Updates that the newest whole checkpoint holds; 0 where there is none."""
    manifest: dict[str, Any] | None
    """Its manifest."""
    rejected: dict[int, str]
    """Of the steps of newer checkpoints, what is wrong with them."""
    damaged: frozenset[int] = frozenset()
    """Of these, the steps of those that are proven to be damaged; others could not be read."""


def newest_whole(
    run: Path, steps: Sequence[int], gather: Gather, rank: int, world_size: int
) -> Newest:
    """Find the newest checkpoint whose files are what was written; the ranks share the hashing.

    Args:
        run: the run's folder.
        steps: of its checkpoints, oldest first.
        gather: every rank's value, on every rank.
        rank: this rank's number.
        world_size: how many there are.

    Raises:
        Failure: there are checkpoints and none is whole. A disk that is not there looks the same,
            so the run is not begun again of itself.
    """
    rejected: dict[int, str] = {}
    damaged: set[int] = set()
    for step in reversed(steps):
        answers = gather(_judged(folder_of(run, step), rank, world_size))
        reasons = [reason for _, reason, _ in answers]
        if not any(reasons):
            return Newest(step, answers[0][0], rejected, frozenset(damaged))
        rejected[step] = _in_words(reasons)
        if any(is_damaged for _, _, is_damaged in answers):
            damaged.add(step)
    if rejected:
        raise Failure(f"{run}: none of its checkpoints is whole: {'; '.join(rejected.values())}")
    return Newest(0, None, rejected)


def _judged(folder: Path, part: int, parts: int) -> tuple[dict[str, Any] | None, str, bool]:
    """A checkpoint's manifest, else what is wrong with it and whether it is proven damaged."""
    try:
        return read_manifest(folder, part, parts), "", False
    except (OSError, ValueError) as error:
        return None, str(error) or type(error).__name__, isinstance(error, Damaged)


def manifest_hash(run: Path, step: int) -> str:
    """What the ledger knows a checkpoint by: its manifest's, which holds those of its files."""
    data = files.retried((folder_of(run, step) / MANIFEST).read_bytes)
    return hashlib.blake2b(data).hexdigest()[:32]


def size_of(manifest: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint's files."""
    return sum(written["bytes"] for written in manifest["files"].values())


def refuse_small_disk(run: Path, count: int, size: int) -> None:
    """Refuse where a disk has no room for checkpoints.

    Args:
        run: the run's folder, which exists.
        count: checkpoints to be written.
        size: bytes of one.

    Raises:
        ValueError: both numbers.
    """
    free = shutil.disk_usage(run).free
    if free < count * size:
        plural = "checkpoint" if count == 1 else "checkpoints"
        raise ValueError(
            f"{run}: {count} {plural} of {size / 1e6:,.1f} MB need {count * size / 1e6:,.1f} MB, "
            f"its disk has {free / 1e6:,.1f} MB free"
        )


def remove(run: Path, keep: set[int], warn: Callable[[str], object]) -> list[int]:
    """Delete every checkpoint folder of a run but those of the steps in `keep`.

    One that cannot be deleted, for instance because a process of another machine has one of its
    files open, is no checkpoint any more; the next call tries again.

    Args:
        run: the run's folder.
        keep: steps.
        warn: told of each folder that could not be deleted.

    Returns:
        The steps whose checkpoint is gone; left-overs of interrupted saves are not counted.
    """
    gone = []
    for folder in sorted((run / "checkpoints").glob("step-*")):
        digits = folder.name.removeprefix("step-")
        if digits.isdigit() and int(digits) in keep:
            continue
        try:
            files.retried(partial(_delete, folder))
        except OSError as error:
            warn(f"WARNING: {folder}: cannot be deleted for now: {error}")
            continue
        if digits.isdigit():
            gone.append(int(digits))
    return gone


def _delete(folder: Path) -> None:
    """Delete a folder, its manifest first: what is half deleted is no checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # as much as can be
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)  # says why the rest cannot


def write_json(path: Path, value: object) -> None:
    """Write JSON, complete or not at all; a number that is not finite is null."""
    write_atomically(path, (files.strict_json(value, indent=1) + "\n").encode())
