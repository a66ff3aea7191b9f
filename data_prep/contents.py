"""Compare the files of a corpus with the hashes that its manifest lists.

A corpus is known by the digest of these hashes, so a file with other contents would go unnoticed.
`check` hashes all files once, and leaves a note: an empty file, named after a hash of the path,
size and time of each and of bytes at fixed places. While these stay the same, a later call reads
only the bytes at those places. The kept tables of blocks are compared with their hashes in the same
way.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from data_prep import cache
from data_prep.common import children
from data_prep.common.files import sha256_of, strict_json
from data_prep.manifest import CorpusManifest

_PLACES = 256
_PLACE_BYTES = 4096
_LARGE_BYTES = 1 << 30  # hashing takes more than about a second: say so


def check(folder: Path, manifest: CorpusManifest) -> None:
    """Refuse files that differ from the manifest, and kept tables from their hashes.

    Files are read wherever they may have changed since the last check.

    Args:
        folder: The corpus.
        manifest: The corpus's.

    Raises:
        ValueError: A file is missing or differs; it is named, or the folder of tables is.
    """
    digest = manifest.digest()
    places = cache.folders(folder, digest)
    problems = (
        f"{problem}; restore the files that `zeroclap prepare` wrote, or prepare the corpus again"
        for problem in differences(folder, manifest)
    )
    _check(_note_of(folder, digest, list(manifest.hashes)), places, problems)
    for tables in cache.kept(folder, digest):
        names = sorted(file.name for file in tables.iterdir())
        _check(_note_of(tables, digest, names), places, cache.differences(tables))


def _check(note: str, places: Sequence[Path], problems: Iterator[str]) -> None:
    """Refuse the first of the problems, which are looked for unless a place has the note."""
    if any(os.path.exists(place / note) for place in places):
        return
    if problem := next(problems, None):
        raise ValueError(problem)
    _leave(note, places)


def noted(folder: Path, manifest: CorpusManifest, problems: Iterator[str]) -> list[str]:
    """Return the problems that hashing all files finds; after none, `check` hashes none again.

    Args:
        folder: The corpus.
        manifest: The corpus's.
        problems: Looks for them.
    """
    digest = manifest.digest()
    try:
        note = _note_of(folder, digest, list(manifest.hashes))
    except ValueError:  # a file is missing, which is one of the problems
        return [*problems]
    if not (found := [*problems]):
        _leave(note, cache.folders(folder, digest))
    return found


def _leave(note: str, places: Sequence[Path]) -> None:
    """Leave a note in the first place that can be written."""
    for place in places:
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            (place / note).touch()
            return


def differences(folder: Path, manifest: CorpusManifest) -> Iterator[str]:
    """Hash all files, in threads, and yield a line for each that differs from the manifest.

    For a large corpus, progress is printed to stderr after every tenth.
    """
    expected = {folder / name: digest for name, digest in manifest.hashes.items()}
    total = sum(file.stat().st_size for file in expected if file.is_file())
    done = 0
    with ThreadPoolExecutor(min(16, children.usable_cores())) as pool:
        # The iterator has no name, so that leaving the loop deletes it and cancels what waits.
        for file, problem in zip(
            expected, pool.map(problem_of, expected, expected.values()), strict=True
        ):
            if problem:
                yield problem
                continue
            before, done = done, done + file.stat().st_size
            if total >= _LARGE_BYTES and 10 * done // total > 10 * before // total:
                amount = f"{done / 1e9:,.1f} of {total / 1e9:,.1f} GB"
                say = f"{folder}: {amount} compared with its manifest"
                print(say, file=sys.stderr, flush=True)


def problem_of(file: Path, expected: str) -> str | None:
    """Return a line if a file is missing or does not have the hex sha256 `expected`."""
    if not file.is_file():
        return f"{file}: no such file, but the manifest names it"
    found = sha256_of(file)
    if found == expected:
        return None
    return f"{file}: its sha256 is {found}, but the manifest has {expected}"


def _note_of(folder: Path, digest: str, names: Sequence[str]) -> str:
    """Name the note that files are right as they are now: path and times, and `sample`."""
    sampled = sample(folder, digest, names)
    now = [str(folder.resolve()), [(folder / name).stat().st_mtime_ns for name in names], sampled]
    return f"contents-{hashlib.blake2b(strict_json(now).encode(), digest_size=16).hexdigest()}"


def sample(folder: Path, digest: str, names: Sequence[str]) -> str:
    """Hash the names and sizes of files and their bytes at fixed places, equal in copies of them.

    Args:
        folder: A corpus, or tables of its blocks.
        digest: The corpus's `CorpusManifest.digest`.
        names: Of the files in the folder.

    Raises:
        ValueError: A file is missing.
    """
    try:
        sizes = [(folder / name).stat().st_size for name in names]
    except OSError as error:
        raise ValueError(f"{error.filename}: no such file, but the manifest names it") from None
    ends = np.cumsum(sizes)
    found = hashlib.blake2b(strict_json([digest, *names, *sizes]).encode(), digest_size=16)
    total = int(ends[-1]) if len(ends) else 0
    draw = np.random.RandomState(int(digest[:8], 16))
    samples = _PLACES if total else 0  # a folder of no table has an empty list of hashes
    for place in np.sort(draw.random_sample(samples) * total).astype(np.int64).tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        with (folder / names[number]).open("rb") as file:
            file.seek(place - (int(ends[number - 1]) if number else 0))
            found.update(file.read(_PLACE_BYTES))
    return found.hexdigest()
