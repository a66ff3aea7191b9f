"""Atomic file writes, strict JSON, retried reads, lock files.

Files are written under a temporary name in the same folder, hashed on the way, flushed to the disk
and renamed. A killed process leaves `*.partial` files, which nothing reads.
"""

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import resource
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

PARTIAL_SUFFIX = ".partial"
_LEFT_BY_KILLED = re.compile(rf"\..+\.[0-9a-f]{{16}}\{PARTIAL_SUFFIX}")
_MOST_OPEN_FILES = 1 << 16
"""Where a machine has no limit, or a huge one, programs that close all that they could have open
would take minutes to start."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system that cannot lock files."""
MALFORMED = (ValueError, RecursionError, LookupError, TypeError, AttributeError)
"""Errors of reading JSON that is not valid, or has another form than is read."""
_PAUSES = (0.1, 0.4, 1.0)
"""Seconds between the attempts of `retried`."""
T = TypeVar("T")


@dataclass(frozen=True)
class FileRecord:
    """Size and content hash of a finished file."""

    size_bytes: int
    sha256: str


class AtomicFile:
    """A file that appears under its name on `commit`, and is removed on `discard`."""

    def __init__(self, path: Path) -> None:
        """Open a temporary file next to `path`, and create the folder if it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._partial = _partial(path)
        with naming(path):
            self._file = self._partial.open("wb", buffering=1 << 20)
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        with naming(self._path):
            self._file.write(data)
        self._hash.update(data)
        self._size_bytes += memoryview(data).nbytes

    def commit(self) -> FileRecord:
        """Flush to the disk and rename to the final name."""
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self._path)
            fsync(self._path.parent)
        return FileRecord(self._size_bytes, self._hash.hexdigest())

    def discard(self) -> None:
        """Close and remove the temporary file; has no effect after `commit`."""
        with suppress(OSError):  # closing writes what is buffered, which a full disk refuses
            self._file.close()
        self._partial.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> FileRecord:
    """Write a file that appears complete or not at all."""
    file = AtomicFile(path)
    try:
        file.write(data)
        return file.commit()
    finally:
        file.discard()


def write_json(path: Path, value: object) -> FileRecord:
    """Write JSON atomically; a number that is not finite becomes null."""
    return write_atomically(path, (strict_json(value, indent=1) + "\n").encode())


def replace_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace a small JSON file atomically, without waiting for the disk (no fsync).

    Its folder is made, but not the one around that, which may have been moved.
    """
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(strict_json(values) + "\n", encoding="utf-8")
    partial.replace(path)


def strict_json(value: object, **options: Any) -> str:  # noqa: ANN401
    """Return `value` as JSON with null in place of numbers that are not finite, at any depth.

    `json.dumps` writes NaN and Infinity, which are not JSON and which many parsers refuse. This
    function writes all JSON of the project, so readers must accept null for a number. The
    options are those of `json.dumps`.
    """
    return json.dumps(_finite(value), allow_nan=False, **options)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: The file is damaged, or holds something else; it is named.
    """
    with named_errors(path):
        return parse_json(path.read_bytes())


def parse_json(data: bytes | str, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Parse JSON that holds an object; the options are those of `json.loads`.

    Raises:
        ValueError: It is damaged, or something else.
    """
    try:
        values = json.loads(data if isinstance(data, str) else data.decode(), **options)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"is not a JSON object but {type(values).__name__}")
    return values


def json_lines(values: Iterable[object], **options: Any) -> bytes:  # noqa: ANN401
    """Return the content of a JSON Lines file; the options are those of `json.dumps`."""
    return "".join(f"{strict_json(value, **options)}\n" for value in values).encode()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def retried(action: Callable[[], T], sleep: Callable[[float], object] = time.sleep) -> T:
    """Return `action()`, with up to four attempts within 1.5 s if it raises OSError.

    FileNotFoundError is raised at once.
    """
    for pause in _PAUSES:
        try:
            return action()
        except FileNotFoundError:
            raise
        except OSError:
            sleep(pause)
    return action()


def read_bytes(path: Path) -> bytes:
    """Read a file, with `retried`; one that does not exist is empty."""
    with suppress(FileNotFoundError):
        return retried(path.read_bytes)
    return b""


def check_writable(file: Path | None) -> None:
    """Raise an error if an output file cannot be written, or would replace more than a file."""
    if file:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise ValueError(f"{file}: is a folder, a link or a device; name a file")
        AtomicFile(file).discard()


def check_absent(output: Path) -> None:
    """Raise an error if an output, which will be a file, exists or cannot be written."""
    if output.exists():
        raise ValueError(f"{output}: exists; choose a new name")
    check_writable(output)


def check_new(output: Path, *ours: str) -> None:
    """Refuse an output folder that exists, unless it is empty but for what killed processes left.

    Args:
        output: The folder.
        ours: Names of files that they may have finished.

    Raises:
        ValueError: `output` is a file, or a folder that is not empty.
    """
    if not output.is_dir():
        check_absent(output)
    elif {name for name in os.listdir(output) if not _LEFT_BY_KILLED.fullmatch(name)} - {*ours}:
        raise ValueError(f"{output}: is not empty; choose a new folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` when the block ends without an error.

    Raises:
        ValueError: `folder` is a file, or is not empty.
    """
    check_new(folder)
    partial = _partial(folder)
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            fsync(path)
        partial.replace(folder)
        fsync(folder.parent)
    except OSError as error:
        error.filename = error.filename or str(folder)  # it is missing when a disk is full
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_partial_folders(folder: Path) -> None:
    """Remove what killed processes left of a `new_folder`; no other may be at work on it."""
    for partial in folder.parent.glob(f".{glob.escape(folder.name)}.*{PARTIAL_SUFFIX}"):
        shutil.rmtree(partial, ignore_errors=True)


def _partial(path: Path) -> Path:
    """Return a temporary name for a file or folder.

    It is random, because another machine may write the same one under the same process id, and a
    killed process may have left one.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")


def lock(path: Path, busy: str) -> TextIO:
    """Lock a file for as long as the returned file object is open.

    Args:
        path: The lock file; it names the process that holds it.
        busy: What to say of the folder if another process holds the lock.

    Raises:
        ValueError: Another process holds the lock; the message names the folder and the process.
    """
    check_not_link(path)
    file = path.open("a+", encoding="utf-8")
    try:
        with naming(path):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    except BlockingIOError:
        with file:
            file.seek(0)
            holder = file.read().strip()
        raise ValueError(
            f"{path.parent}: {busy} ({holder}); wait for it, end it, or name another folder"
        ) from None
    except OSError as error:
        file.close()
        if error.errno in NO_LOCKS:
            error.strerror = (
                f"{error.strerror}: this file system has no locks (flock); mount it with them, as "
                "Lustre with -o flock, or name a folder on another one"
            )
        raise
    return file


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Wait for other processes that work in a folder; yield False if its files cannot be locked."""
    descriptor, is_alone = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_alone = True
        yield is_alone
    finally:
        os.close(descriptor)


def allow_open_files() -> None:
    """Let this process and its children have as many files open as the machine allows them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_OPEN_FILES)), hard))


def described(error: OSError) -> str:
    """Return what an error says, with its file, and the limit where too many files are open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    remedy = f"; this process may have {limit} open (`ulimit -n`): allow more"
    text = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    return text + (remedy if error.errno == errno.EMFILE else "")


def check_not_link(path: Path) -> None:
    """Raise ValueError if a file is a symbolic link, through which another one would be changed."""
    if path.is_symlink():
        raise ValueError(f"{path}: is a symbolic link; put the file itself in its place")


def sha256_of(path: Path) -> str:
    """Return the hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError; it is missing when a disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Raise ValueError with the name of a file that is not as this program has written it."""
    try:
        yield
    except MALFORMED as error:
        raise ValueError(f"{path}: is damaged: {error!r}") from None


@contextmanager
def named_errors(source: object, separator: str = ": ") -> Iterator[None]:
    """Put the name of what is read or checked before the message of a ValueError; "" adds none."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}{separator}{error}" if source else str(error)) from None


def fsync(path: Path) -> None:
    """Flush a file, or a folder, so that renames in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_format(found: object, known: int, source: object) -> None:
    """Refuse a file of another format version than the one that is read.

    Args:
        found: Version in the file.
        known: The version that is read.
        source: File, for messages.

    Raises:
        ValueError: It is another version; names the file and both.
    """
    if type(found) is int and found == known:
        return
    later = type(found) is int and found > known
    reason = "was written by a later version of zeroclap" if later else "is not accepted"
    raise ValueError(f"{source}: format version {found!r} {reason}; known: {known}")
