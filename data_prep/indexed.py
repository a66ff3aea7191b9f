r"""Megatron's indexed format; no other file knows its layout.

    prefix.bin   the ids of all sequences, concatenated
    prefix.idx   b"MMIDIDX\0\0", u64 version 1, u8 code of the id type
                 u64 sequences, u64 documents + 1
                 i32 length of each sequence, in ids
                 i64 offset of each sequence in prefix.bin, in bytes
                 i64 first sequence of each document, and the number of sequences

Little-endian, without padding. A sequence is a document or one of its sentences. The writer gives
the same bytes as megatron-core's `IndexedDatasetBuilder`, and the reader the same arrays as its
`IndexedDataset`, but both need numpy only, so that a process starts quickly. `verify` and the tests
read the files through megatron-core too.

Order: layout, writer, reader.
"""

import ctypes
import mmap
import os
import struct
import sys
import warnings
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.common.files import AtomicFile, FileRecord

Ids = npt.NDArray[np.integer[Any]]
"""Token ids, of the type that a dataset stores."""
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPE_OF_CODE: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
"""By the codes of megatron.core.datasets.indexed_dataset.DType; the types of `dtype_for`."""
_CODE_OF_TYPE = {dtype: code for code, dtype in _TYPE_OF_CODE.items()}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
_NO_IDS = np.empty(0, np.int32)
_WINDOW = 1 << 20  # entries of a column in memory at a time


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the id type by Megatron's rule: uint16 for fewer than 65500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """Writes one dataset, whose files appear under their names on `close`.

    Memory: 4 bytes per sequence and 4 per document, and the ids that wait for `flush`.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        """Start a dataset.

        Args:
            prefix: Path without `.bin` and `.idx`.
            vocab_size: Ids must be below it; it decides their type, by `dtype_for`.
        """
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._dtype = dtype_for(vocab_size)
        self.lengths = array("i")
        """Ids of each sequence appended so far."""
        self._sequences = array("i")  # sequences per document
        self._waiting: list[Ids] = []
        self._data = AtomicFile(Path(f"{prefix}.bin"))

    def append(self, ids: Sequence[Ids], lengths: Sequence[int]) -> None:
        """Append a document, which `flush` writes.

        Args:
            ids: Pieces of any size, which follow each other.
            lengths: Number of ids in each sequence.
        """
        self._waiting += ids
        self.lengths.extend(lengths)
        self._sequences.append(len(lengths))

    def flush(self) -> Ids:
        """Write and return the ids of the documents appended since the last call.

        Raises:
            ValueError: An id is negative or not in the vocabulary; none is written then.
        """
        ids = np.concatenate([_NO_IDS, *self._waiting])
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size):
            raise ValueError(
                f"{self._prefix}: ids from {ids.min()} to {ids.max()} in a vocabulary of "
                f"{self._vocab_size}"
            )
        self._data.write(ids.astype(self._dtype).data)
        self._waiting.clear()
        return ids

    def close(self) -> tuple[FileRecord, FileRecord]:
        """Write what was appended and the index; commit and return the records of .bin and .idx."""
        self.flush()
        index = AtomicFile(Path(f"{self._prefix}.idx"))
        try:
            for piece in self._index_pieces():
                index.write(piece)
            return self._data.commit(), index.commit()
        finally:
            index.discard()

    def discard(self) -> None:
        """Remove what was written; has no effect after `close`."""
        self._data.discard()

    def _index_pieces(self) -> Iterator[bytes]:
        lengths = np.asarray(self.lengths)
        counts = (len(lengths), len(self._sequences) + 1)
        yield _HEADER.pack(_MAGIC, _VERSION, _CODE_OF_TYPE[self._dtype], *counts)
        yield lengths.astype("<i4").tobytes()
        for starts in _starts(lengths, self._dtype.itemsize):
            yield starts.tobytes()
        for starts in _starts(np.append(self._sequences, np.int32(0)), 1):
            yield starts.tobytes()


def _starts(sizes: npt.NDArray[np.int32], unit: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield where each entry starts, in bytes or sequences: the exclusive cumulative sum."""
    start = 0
    for first in range(0, len(sizes), _WINDOW):
        window = sizes[first : first + _WINDOW].astype(np.int64) * unit
        ends = start + np.cumsum(window)
        yield (ends - window).astype("<i8")
        start = int(ends[-1])


class IndexedReader:
    """A dataset, memory-mapped. Arrays that it returns are read-only views and may outlive it."""

    def __init__(self, prefix: Path) -> None:
        """Open a dataset and check its index against itself and the size of its data.

        Args:
            prefix: Path without `.bin` and `.idx`.

        Raises:
            ValueError: A file is missing, of another format or version, or the index is damaged.
                The message names the file, the sequence and the value.
        """
        index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        content = _mapped(index)
        dtype, sequences, bounds = _header(index, content)
        start = _HEADER.size
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(content, "<i4", sequences, start)
        """Number of ids in each sequence; int32 [sequences]."""
        start += 4 * sequences
        self.offsets: npt.NDArray[np.int64] = np.frombuffer(content, "<i8", sequences, start)
        """Place of each sequence in the data, in bytes; int64 [sequences]."""
        start += 8 * sequences
        self.bounds: npt.NDArray[np.int64] = np.frombuffer(content, "<i8", bounds, start)
        """First sequence of each document, and the number of sequences; int64 [documents + 1]."""
        content = _mapped(data)
        self.ids: Ids = np.frombuffer(content, dtype, len(content) // dtype.itemsize)
        """All ids; [ids]."""
        self._check(index, data, len(content))

    def __getitem__(self, number: int) -> Ids:
        """Return the ids of a sequence."""
        return self.ids[self.span(number, number + 1)]

    def span(self, first: int, end: int) -> slice:
        """Return the places in `ids` of the sequences [first, end), at least one."""
        stop = int(self.offsets[end - 1]) // self.ids.itemsize + int(self.lengths[end - 1])
        return slice(int(self.offsets[first]) // self.ids.itemsize, stop)

    def _check(self, index: Path, data: Path, size_bytes: int) -> None:
        """Check the index against itself and against the size of its data."""
        lengths, offsets, bounds = self.lengths, self.offsets, self.bounds
        if lengths.min(initial=0) < 0:
            bad = int(lengths.argmin())
            raise ValueError(f"{index}: sequence {bad} has the length {lengths[bad]}")
        for number, expected in enumerate(_starts(lengths, self.ids.itemsize)):
            first = number * _WINDOW
            if (is_bad := offsets[first : first + _WINDOW] != expected).any():
                bad = int(is_bad.argmax())
                raise ValueError(
                    f"{index}: sequence {first + bad} has the offset {offsets[first + bad]}, but "
                    f"the lengths before it sum to {expected[bad]} bytes"
                )
        end = int(offsets[-1]) + int(lengths[-1]) * self.ids.itemsize if len(lengths) else 0
        if size_bytes != end:
            raise ValueError(f"{data}: {size_bytes} bytes, but its index says {end}")
        if bounds[0] != 0 or bounds[-1] != len(lengths) or np.any(bounds[1:] <= bounds[:-1]):
            raise ValueError(
                f"{index}: the documents' first sequences do not ascend from 0 to {len(lengths)}"
            )


def import_megatron() -> ModuleType:
    """Import megatron-core's module for this format without its warnings, which takes about 2 s.

    The arrays of its `IndexedDataset` are views that must not outlive the dataset: it unmaps the
    file in `__del__`, and reading a view then ends the process.
    """
    with warnings.catch_warnings():
        # Transformer Engine, Apex and deprecations do not matter for reading files.
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|megatron)\.")
        import megatron.core.datasets.indexed_dataset as module
    return sys.modules[module.__name__]


def _mapped(file: Path) -> memoryview:
    """Map a file into memory for as long as the view or an array of it is used.

    The mapping needs no open file. One of Python's `mmap` keeps one, and a corpus may have more
    shards than a process may have open files.

    Raises:
        ValueError: There is no such file.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    with file.open("rb") as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        if not size_bytes:  # cannot be mapped
            return memoryview(b"")
        options = mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), 0
        address = _LIBC.mmap(None, size_bytes, *options)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(file))
    content = (ctypes.c_ubyte * size_bytes).from_address(address)
    # Not at exit, when an array may still be read.
    weakref.finalize(content, _LIBC.munmap, address, size_bytes).atexit = False
    return memoryview(content).toreadonly()


def _header(index: Path, content: memoryview) -> tuple[np.dtype[Any], int, int]:
    """Return the type of the ids, and the numbers of sequences and of bounds of documents."""
    if len(content) < _HEADER.size or content[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{index}: not a Megatron index (it does not start with {_MAGIC!r})")
    _, version, code, sequences, bounds = _HEADER.unpack_from(content)
    if version != _VERSION or code not in _TYPE_OF_CODE:
        raise ValueError(
            f"{index}: version {version} with id type {code}; accepted: version {_VERSION} with "
            f"{', '.join(f'{code} ({dtype})' for code, dtype in _TYPE_OF_CODE.items())}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if bounds < 1 or len(content) != expected:
        raise ValueError(
            f"{index}: {len(content)} bytes, but its header ({sequences} sequences, "
            f"{bounds} document bounds) requires {expected}"
        )
    return _TYPE_OF_CODE[code], sequences, bounds
