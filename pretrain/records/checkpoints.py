"""Checkpoints that are committed by all ranks or do not exist.

DeepSpeed writes each rank's files under their final names and points `latest` at them before the
other ranks are done, so a crash leaves a pointer to an incomplete checkpoint. Here the ranks write
into a staging folder and each hashes its own files; when all have answered, rank 0 writes
MANIFEST.json and renames the folder. A folder without a manifest is not a checkpoint, and no
checkpoint is loaded before its hashes are verified.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.common import files
from data_prep.common.files import fsync, write_json
from data_prep.common.wording import count
from pretrain.records.collective import Failure, Group, join_reasons, on_every_rank

MANIFEST = "MANIFEST.json"
FORMAT_VERSION = 1
"""Of the manifest."""
BYTES_PER_PARAMETER = 16
"""Upper bound for a checkpoint: the weights as trained, and in fp32 with Adam's two moments."""

Fingerprints = dict[str, dict[str, object]]


class DamagedFile(ValueError):
    """A file of a checkpoint is proven to differ from what was written."""


def folder_of(run: Path, step: int) -> Path:
    """The checkpoint folder of a run after `step` updates."""
    return run / "checkpoints" / f"step-{step:08d}"


def save(
    run: Path,
    step: int,
    facts: Callable[[], Mapping[str, object]],
    *,
    write: Callable[[Path], None],
    group: Group,
    token: str,
) -> None:
    """Write and commit a checkpoint; every rank calls this after the same step.

    Args:
        run: the run's folder.
        step: number of updates done.
        facts: called on rank 0 when everything is written: returns what the manifest has beside the
            hashes, or raises ValueError to prevent the commit.
        write: writes this rank's part below a folder (`Engine.save`).
        group: the ranks.
        token: of the attempt; separates its staging folder from those of earlier attempts.

    Raises:
        Failure: on every rank; nothing was committed, and what was written is removed.
    """
    final = folder_of(run, step)
    staging = final.with_name(f"{final.name}.{token}.partial")

    def prepare() -> None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def write_own() -> Fingerprints:
        write(staging)
        own = [path for path in staging.iterdir() if _owner(path) == group.rank]
        for path in own:
            fsync(path)
        return {path.name: fingerprint(path) for path in own}

    group.on_rank_0(prepare)
    try:
        parts = on_every_rank(write_own, group.gather)

        def commit() -> None:
            manifest = {"format_version": FORMAT_VERSION, "step": step, **facts()}
            fingerprints = {name: value for part in parts for name, value in part.items()}
            manifest["files"] = fingerprints
            write_json(staging / MANIFEST, manifest)  # also makes the folder's entries durable
            _replace(final, staging)

        group.on_rank_0(commit)
    except Failure:
        if group.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)  # frees space on a full disk
        raise


def _replace(final: Path, staging: Path) -> None:
    """Rename a finished checkpoint, replacing an older one of the same step."""
    shutil.rmtree(final, ignore_errors=True)
    if final.exists():  # one of its files cannot be deleted now; `remove` tries again
        final.rename(final.with_name(f"{final.name}.{secrets.token_hex(8)}.old"))
    staging.rename(final)
    fsync(final.parent)


def _owner(path: Path) -> int:
    """The rank that wrote a DeepSpeed file: the number after `pp_rank_`, else rank 0."""
    found = re.search(r"pp_rank_(\d+)_", path.name)
    return int(found.group(1)) if found else 0


def fingerprint(path: Path) -> dict[str, object]:
    """Size and hash of a file."""
    with path.open("rb") as file, files.naming(path):
        digest = hashlib.file_digest(file, "blake2b").hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": digest}


def read_manifest(
    folder: Path, committed: str = "", part: int = 0, parts: int = 1
) -> dict[str, Any]:
    """Verify the files of a checkpoint and return its manifest.

    Args:
        folder: the checkpoint.
        committed: hash of its manifest, as the ledger has it; "" compares none.
        part: index of this rank's share of the files, every `parts`-th one, of which it compares
            size and hash.
        parts: number of ranks that share them.

    Raises:
        DamagedFile: a file is cut short or changed; the message names it.
        ValueError: the manifest is not valid, or a file is missing; the message names it.
        OSError: a file cannot be read after several tries, which proves nothing about it.
    """
    try:
        data = files.retried((folder / MANIFEST).read_bytes)
        manifest: dict[str, Any] = json.loads(data)
        fingerprints: Fingerprints = manifest["files"]
        sizes = {name: written["bytes"] for name, written in fingerprints.items()}
        version = manifest["format_version"]
    except (FileNotFoundError, *files.MALFORMED) as error:
        reason = f"not a checkpoint, {MANIFEST} cannot be read: {error}"
        raise ValueError(f"{folder}: {reason}") from None
    files.check_format(version, FORMAT_VERSION, folder / MANIFEST)
    if committed not in ("", _hash(data)):
        raise DamagedFile(f"{folder / MANIFEST}: is not what was committed, its hash differs")
    try:
        for name in sorted(fingerprints)[part::parts]:
            found = files.retried((folder / name).stat).st_size
            if found != sizes[name]:
                raise DamagedFile(f"{folder / name}: has {found} bytes, {sizes[name]} were written")
            if files.retried(partial(fingerprint, folder / name)) != fingerprints[name]:
                raise DamagedFile(f"{folder / name}: is not what was written, its hash differs")
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}: is missing from the checkpoint") from None
    return manifest


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run can continue from."""

    step: int
    """Number of updates that it holds; 0 without a checkpoint."""
    manifest: dict[str, Any] | None
    rejected: dict[int, str]
    """Steps of newer checkpoints that do not verify, with the reasons."""
    damaged: frozenset[int] = frozenset()
    """The rejected steps with proven damage; the others could not be read."""


def find_resume_point(run: Path, committed: Mapping[int, str], group: Group) -> ResumePoint:
    """Find the newest checkpoint that verifies; the ranks share its files.

    Args:
        run: the run's folder.
        committed: hashes of the manifests of its checkpoints, by step, oldest first.
        group: the ranks.

    Raises:
        Failure: there are checkpoints and none verifies. A missing disk looks the same, so the run
            is not started from step 0 automatically.
    """
    rejected: dict[int, str] = {}
    damaged: set[int] = set()
    for step in sorted(committed, reverse=True):
        part = group.rank, group.world_size
        manifest, *answer = _verify(folder_of(run, step), committed[step], *part)
        reasons, are_damaged = zip(*group.gather(answer), strict=True)
        if not any(reasons):
            return ResumePoint(step, group.broadcast(manifest), rejected, frozenset(damaged))
        rejected[step] = join_reasons(reasons)
        if any(are_damaged):
            damaged.add(step)
    if rejected:
        raise Failure(f"{run}: none of its checkpoints is intact: {'; '.join(rejected.values())}")
    return ResumePoint(0, None, rejected)


def _verify(
    folder: Path, committed: str, part: int, parts: int
) -> tuple[dict[str, Any] | None, str, bool]:
    """Return the manifest, or why the checkpoint does not verify and whether damage is proven."""
    try:
        return read_manifest(folder, committed, part, parts), "", False
    except (OSError, ValueError) as error:
        return None, str(error) or type(error).__name__, isinstance(error, DamagedFile)


def manifest_hash(run: Path, step: int) -> str:
    """Hash of a checkpoint's manifest, which contains the hashes of its files."""
    return _hash(files.retried((folder_of(run, step) / MANIFEST).read_bytes))


def _hash(manifest: bytes) -> str:
    return hashlib.blake2b(manifest).hexdigest()[:32]


def size_of(manifest: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint's files."""
    return sum(written["bytes"] for written in manifest["files"].values())


def free_bytes(run: Path) -> int:
    """Bytes free on the disk of a run's checkpoints, whose folder may be a link to another one."""
    folder = run / "checkpoints"
    return shutil.disk_usage(folder if folder.exists() else run).free


def check_disk_space(run: Path, number: int, size: int) -> None:
    """Check that the disk has room for checkpoints.

    Args:
        run: the run's folder, which exists.
        number: of checkpoints to be written.
        size: bytes of one.

    Raises:
        ValueError: names both numbers.
    """
    free = free_bytes(run)
    if free < number * size:
        raise ValueError(
            f"{run}: {count(number, 'checkpoint')} of {size / 1e6:,.1f} MB need "
            f"{number * size / 1e6:,.1f} MB, its disk has {free / 1e6:,.1f} MB free"
        )


def remove(run: Path, keep: set[int], warn: Callable[[str], object]) -> None:
    """Delete every checkpoint folder of a run except those of the steps in `keep`.

    A folder that cannot be deleted, for instance because another machine has one of its files
    open, is no longer a checkpoint; the next call tries again.

    Args:
        run: the run's folder.
        keep: steps.
        warn: called with a message for each folder that could not be deleted.
    """
    kept = {folder_of(run, step) for step in keep}
    for folder in sorted({*(run / "checkpoints").glob("step-*")} - kept):
        try:
            files.retried(partial(_delete, folder))
        except OSError as error:
            warn(f"WARNING: {folder}: cannot be deleted for now: {error}")


def _delete(folder: Path) -> None:
    """Delete a folder, its manifest first, so that what is left is not a checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # deletes as much as it can
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)  # raises the reason if anything is left
