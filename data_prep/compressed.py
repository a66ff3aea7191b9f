"""Byte streams of inputs, plain or compressed, that never end early without a word."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

# A block of 4 bytes may stand for 128 KiB of zstd output, so that this bounds what one piece
# unpacks to (134 MB).
_PIECE_BYTES = 4096
_BUFFER_BYTES = 1 << 20


@contextmanager
def open_stream(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for reading, unpacked by its suffix (.zst, .gz, else as it is).

    Raises:
        ValueError: While reading: the file is cut short, damaged, or not what its suffix says.
    """
    import zstandard

    if path.suffix in (".zst", ".gz") and not path.stat().st_size:
        raise ValueError(f"{path}: empty; a {path.suffix} file has at least a header")
    try:
        with _unpacked(path) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: cut short or damaged: {error}") from error


def _unpacked(path: Path) -> BinaryIO:
    if path.suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(path), _BUFFER_BYTES))
    if path.suffix == ".gz":
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
