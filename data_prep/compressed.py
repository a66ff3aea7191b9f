"""Byte streams of inputs, plain or compressed, that never end early without a word.

What no reader can notice: a .zst or .gz file may hold several frames or members, and one that was
cut exactly between two of them is a whole file.
"""

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

# A block of 4 bytes may stand for 128 KiB of zstd output, so that this bounds what one piece
# unpacks to (134 MB).
_PIECE_BYTES = 4096
_BUFFER_BYTES = 1 << 20
_KIND_OF_SUFFIX = {".zst": "zstd", ".gz": "gzip"}
# How files begin that no text in UTF-8 is likely to begin like.
_BEGINNINGS = {
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a frame, or one to skip
    "gzip": re.compile(rb"\x1f\x8b"),
    "bzip2": re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zip": re.compile(rb"PK\x03\x04"),
    "Parquet": re.compile(rb"PAR1\x15"),
}
_LONGEST_BEGINNING = 10


class DamagedInput(ValueError):
    """An input is cut short or damaged; what came before was handed out as far as it was whole."""


@contextmanager
def open_stream(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for reading, unpacked by its suffix (.zst, .gz, else as it is).

    Raises:
        ValueError: The file is not what its suffix says.
        DamagedInput: While reading: it is cut short or damaged.
    """
    import zstandard

    _check_kind(path)
    try:
        with _unpacked(path) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DamagedInput(f"{path}: cut short or damaged: {error}") from error
    except OSError as error:
        error.filename = error.filename or str(path)  # a failing disk names no file
        raise


def _check_kind(path: Path) -> None:
    """Raise where a file does not begin as its suffix says."""
    with path.open("rb") as file:
        head = file.read(_LONGEST_BEGINNING)
    expected = _KIND_OF_SUFFIX.get(path.suffix)
    found = next((kind for kind, begins in _BEGINNINGS.items() if begins.match(head)), None)
    if expected and not head:
        raise DamagedInput(f"{path}: empty; a {path.suffix} file has at least a header")
    if expected and found != expected:
        seen = found or ("plain text" if head.isascii() else "neither a packed file nor plain text")
        raise ValueError(f"{path}: not {expected}, as its name says; it looks like {seen}")
    if found and not expected:
        raise ValueError(
            f"{path}: not plain, as its name says; it looks like {found}; accepted: a plain file, "
            "or the suffix .zst or .gz after the name's own"
        )


def _unpacked(path: Path) -> BinaryIO:
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(path), _BUFFER_BYTES))
    if path.suffix == ".gz":
        # A larger buffer around it would be a fifth faster, and lose what it held before damage.
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb", buffering=_BUFFER_BYTES)


class _ZstdStream(io.RawIOBase):
    """The content of all frames of a .zst file.

    python-zstandard's own `stream_reader` ends without an error where a file was cut short (0.25).
    This goes frame by frame and knows whether the last one ended.
    """

    def __init__(self, path: Path) -> None:
        import zstandard

        self._file = path.open("rb", buffering=_BUFFER_BYTES)
        self._context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._context.decompressobj()
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        while not self._output:
            piece = self._next_piece()
            if not piece:
                return 0
            self._output = memoryview(self._frame.decompress(piece))
        count = min(len(target), len(self._output))
        target[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def _next_piece(self) -> bytes:
        """Compressed bytes for the current frame, or none at the end of the file."""
        if not self._frame.eof:
            piece = self._file.read(_PIECE_BYTES)
            if not piece:
                raise EOFError("the last zstd frame does not end")
            return piece
        piece = self._frame.unused_data or self._file.read(_PIECE_BYTES)
        if piece:
            self._frame = self._context.decompressobj()
        return piece
