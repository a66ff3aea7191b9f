"""Open plain and compressed inputs, with an error where a file is cut short or damaged.

A .zst or .gz file may hold several frames or members. A file that was cut exactly between two of
them is valid, so this case cannot be detected.
"""

import gzip
import io
import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

# A 4-byte zstd block may expand to 128 KiB, so this bounds the output of one piece to 134 MB.
_PIECE_BYTES = 4096
_BUFFER_BYTES = 1 << 20
_KIND_OF_SUFFIX = {".zst": "zstd", ".gz": "gzip"}
# Beginnings of files of each kind; UTF-8 text is unlikely to begin with one of them.
_BEGINNINGS = {
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a data or skippable frame
    "gzip": re.compile(rb"\x1f\x8b"),
    "bzip2": re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zip": re.compile(rb"PK\x03\x04"),
    "Parquet": re.compile(rb"PAR1\x15"),
}
_BEGINNING_BYTES = 64


class DamagedInput(ValueError):
    """An input is cut short or damaged; what precedes the damage was read."""


@contextmanager
def open_stream(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for reading and decompress .zst and .gz files.

    Raises:
        ValueError: The content does not match the suffix.
        DamagedInput: While reading: the file is cut short or damaged.
    """
    import zstandard

    _check_kind(path)
    try:
        with _decompressed(path) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DamagedInput(f"{path}: cut short or damaged: {error}") from error
    except OSError as error:
        error.filename = error.filename or str(path)  # not set when a disk fails
        raise


def beginning(path: Path) -> bytes:
    """Return the first bytes of the content of a file, or none if it is damaged there.

    Raises:
        ValueError: A compressed file's content does not match the suffix.
    """
    if path.suffix not in _KIND_OF_SUFFIX:
        return _stored(path)
    with suppress(DamagedInput), open_stream(path) as stream:
        return stream.read(_BEGINNING_BYTES)
    return b""


def kind_of(head: bytes) -> str | None:
    """Return the kind of a file that begins with these bytes, unless it may be plain text."""
    return next((kind for kind, begins in _BEGINNINGS.items() if begins.match(head)), None)


def _stored(path: Path) -> bytes:
    """Return the first bytes of a file as they are stored, perhaps compressed."""
    with path.open("rb") as file:
        return file.read(_BEGINNING_BYTES)


def _check_kind(path: Path) -> None:
    """Raise if the beginning of a file does not match its suffix."""
    head = _stored(path)
    expected, found = _KIND_OF_SUFFIX.get(path.suffix), kind_of(head)
    if expected and not head:
        raise DamagedInput(f"{path}: empty; a {path.suffix} file has at least a header")
    if expected and found != expected:
        seen = found or (
            "plain text" if head.isascii() else "neither a compressed file nor plain text"
        )
        raise ValueError(f"{path}: not {expected} as its name says; it looks like {seen}")
    if found and not expected:
        raise ValueError(
            f"{path}: not plain as its name says; it looks like {found}; add the suffix .zst or "
            ".gz, or decompress it"
        )


def _decompressed(path: Path) -> BinaryIO:
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(path), _BUFFER_BYTES))
    if path.suffix == ".gz":
        # A larger buffer around it would be 20 % faster, but lose its content at damage.
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb", buffering=_BUFFER_BYTES)


class _ZstdStream(io.RawIOBase):
    """The decompressed content of all frames of a .zst file.

    The `stream_reader` of python-zstandard 0.25 reports no error for a file that is cut short. This
    class reads frame by frame and knows whether the last frame is complete.
    """

    def __init__(self, path: Path) -> None:
        self._pieces = _zstd_pieces(path)
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        if not self._output:
            self._output = memoryview(next(self._pieces, b""))
        count = min(len(target), len(self._output))
        target[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def close(self) -> None:
        self._pieces.close()
        super().close()


def _zstd_pieces(path: Path) -> Generator[bytes, None, None]:
    """Yield the content of all frames in non-empty pieces."""
    import zstandard

    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        while piece := file.read(_PIECE_BYTES):
            while piece:
                frame = frame or context.decompressobj()
                if output := frame.decompress(piece):
                    yield output
                piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("the last zstd frame is incomplete")
