"""Files that appear complete or not at all.

Everything that a reader may trust is written under a temporary name in its own folder, hashed on
the way, flushed to the disk and renamed. A killed process leaves `*.partial` files, which nothing
reads.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True)
class FileRecord:
    """Size and content hash of a finished file."""

    size_bytes: int
    sha256: str


class AtomicFile:
    """A file being written; `commit` gives it its name, `discard` removes it."""

    def __init__(self, path: Path) -> None:
        """Open a temporary file beside `path`, whose folder is made where missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        # A name of its own: the same file may be in work on another machine, where process ids are
        # the same, and left over from a killed run.
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
        self._file = self._partial.open("wb", buffering=1 << 20)
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        with _naming(self._path):
            self._file.write(data)
        self._hash.update(data)
        self._size_bytes += memoryview(data).nbytes

    def commit(self) -> FileRecord:
        """Flush to the disk and rename to the final name."""
        with _naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._partial.replace(self._path)
        fsync_folder(self._path.parent)
        return FileRecord(self._size_bytes, self._hash.hexdigest())

    def discard(self) -> None:
        """Close and remove the temporary file; harmless after `commit`."""
        with suppress(OSError):  # closing writes what is buffered, which a full disk refuses
            self._file.close()
        self._partial.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> FileRecord:
    """Write a whole file that is there complete or not at all."""
    file = AtomicFile(path)
    try:
        file.write(data)
        return file.commit()
    finally:
        file.discard()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill under a temporary name; it gets its own when the block ends without error.

    Raises:
        ValueError: `folder` is a file, or holds something already.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder}: is not empty; accepted: a new folder, or an empty one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    partial.mkdir()
    try:
        yield partial
        for path in partial.rglob("*"):
            if path.is_dir():
                fsync_folder(path)
            else:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        fsync_folder(partial)
        partial.replace(folder)
        fsync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def lock(path: Path, busy: str) -> TextIO:
    """Hold a lock file for as long as the file returned is open; the system lets go of it.

    Raises:
        ValueError: Another process holds it: the folder, what `busy` says of it, the process.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            holder = file.read().strip()
        raise ValueError(
            f"{path.parent}: {busy} ({holder}); wait for it, end it, or name another folder"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in what the system says, which it does not where a disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def fsync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
