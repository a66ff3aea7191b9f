r"""Megatron's indexed format; no other file knows its layout.

    prefix.bin   the ids of all sequences, concatenated
    prefix.idx   b"MMIDIDX\0\0", u64 version 1, u8 code of the id type
                 u64 sequences, u64 documents + 1
                 i32 length of each sequence, in ids
                 i64 offset of each sequence in prefix.bin, in bytes
                 i64 first sequence of each document, and the number of sequences

Little-endian, without padding. A sequence is a document or one of its sentences. The writer gives
the same bytes as megatron-core's `IndexedDatasetBuilder`, but needs numpy only, so that a worker
starts quickly. Documents are read through megatron-core.

Order: layout, writer, readers, check.
"""

import struct
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from data_prep.files import AtomicFile, FileRecord

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
# Integer types of megatron.core.datasets.indexed_dataset.DType by code.
_TYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("int16"),
    4: np.dtype("int32"),
    5: np.dtype("int64"),
    8: np.dtype("uint16"),
}
_CODE_OF_TYPE = {dtype: code for code, dtype in _TYPE_OF_CODE.items()}
_WINDOW = 1 << 20  # entries of a column in memory at a time


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the id type by Megatron's rule: uint16 for fewer than 65500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """Writes one dataset, whose files appear under their names on `close`.

    As a context manager it closes on success and removes the files on an exception. Memory: 4 bytes
    per sequence and 4 per document.
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike, vocab_size: int | None = None) -> None:
        """Start a dataset.

        Args:
            prefix: Path without `.bin` and `.idx`.
            dtype: Id type, as from `dtype_for`.
            vocab_size: Ids must be below it; the default is the capacity of `dtype`.
        """
        self._dtype = np.dtype(dtype)
        if self._dtype not in _CODE_OF_TYPE:
            accepted = ", ".join(map(str, _CODE_OF_TYPE))
            raise ValueError(f"{prefix}: ids of type {self._dtype}; accepted: {accepted}")
        capacity = int(np.iinfo(self._dtype).max) + 1
        self._limit = capacity if vocab_size is None else min(vocab_size, capacity)
        self._prefix = prefix
        self._lengths = array("i")  # ids per sequence
        self._sequences = array("i")  # sequences per document
        self._data = AtomicFile(Path(f"{prefix}.bin"))

    @property
    def documents(self) -> int:
        """Number of documents appended so far."""
        return len(self._sequences)

    @property
    def sequences(self) -> int:
        """Number of sequences appended so far."""
        return len(self._lengths)

    def append(self, ids: npt.NDArray[np.integer[Any]]) -> None:
        """Append one document as one sequence.

        Raises:
            ValueError: An id is negative or not below the limit.
        """
        self.extend(ids, [ids.size])

    def extend(
        self,
        ids: npt.NDArray[np.integer[Any]],
        lengths: Sequence[int],
        sequences: Sequence[int] | None = None,
    ) -> None:
        """Append several documents, which is much faster than one at a time.

        Args:
            ids: The concatenated ids of all documents.
            lengths: Number of ids in each sequence.
            sequences: Number of sequences in each document; the default is one.

        Raises:
            ValueError: As in `append`; no document is written then.
        """
        sequences = [1] * len(lengths) if sequences is None else sequences
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._limit):
            bad = int(np.argmax((ids < 0) | (ids >= self._limit)))
            ends = np.cumsum(lengths)[np.cumsum(sequences) - 1]
            document = self.documents + int(np.searchsorted(ends, bad, side="right"))
            raise ValueError(
                f"{self._prefix}: document {document} has id {ids[bad]}; "
                f"accepted: 0 to {self._limit - 1}"
            )
        self._data.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        self._lengths.extend(lengths)
        self._sequences.extend(sequences)

    def close(self) -> tuple[FileRecord, FileRecord]:
        """Write the index and commit both files; return the records of .bin and .idx."""
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

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close, or discard if the block raised."""
        if kind is None:
            self.close()
        else:
            self.discard()

    def _index_pieces(self) -> Iterator[bytes]:
        lengths = np.asarray(self._lengths)
        counts = (self.sequences, self.documents + 1)
        yield _HEADER.pack(_MAGIC, _VERSION, _CODE_OF_TYPE[self._dtype], *counts)
        yield lengths.astype("<i4").tobytes()
        yield from _starts(lengths, self._dtype.itemsize)
        yield from _starts(np.append(self._sequences, np.int32(0)), 1)


def _starts(sizes: npt.NDArray[np.int32], unit: int) -> Iterator[bytes]:
    """Yield where each entry starts, in bytes or sequences: the exclusive cumulative sum."""
    start = 0
    for first in range(0, len(sizes), _WINDOW):
        window = sizes[first : first + _WINDOW].astype(np.int64) * unit
        ends = start + np.cumsum(window)
        yield (ends - window).astype("<i8").tobytes()
        start = int(ends[-1])


def open_indexed(prefix: Path) -> "IndexedDataset":
    """Open a dataset through megatron-core, memory-mapped.

    The arrays it returns are views of the map and must not outlive the dataset: megatron-core
    unmaps the file in `__del__`, and reading a view then ends the process. Importing torch and
    megatron-core takes about 3 s.

    Raises:
        ValueError: A file is missing or damaged.
    """
    _read_header(prefix)
    data = Path(f"{prefix}.bin")
    if not data.is_file():
        raise ValueError(f"{data}: no such file, but {prefix.name}.idx exists")
    # An empty file cannot be memory-mapped.
    return import_megatron().IndexedDataset(str(prefix), mmap=data.stat().st_size > 0)


def import_megatron() -> ModuleType:
    """Import megatron-core's module for this format without its warnings."""
    with warnings.catch_warnings():
        # Transformer Engine, Apex and deprecations do not matter for reading files.
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|megatron)\.")
        return import_module("megatron.core.datasets.indexed_dataset")


def read_lengths(prefix: Path) -> npt.NDArray[np.int32]:
    """Return the number of ids in each sequence; int32 [sequences].

    Raises:
        ValueError: The index is missing, of another format or version, or its size contradicts its
            header.
    """
    header = _read_header(prefix)
    return _column(prefix, "<i4", header.sequences, _HEADER.size)


def read_document_bounds(prefix: Path) -> npt.NDArray[np.int64]:
    """Return each document's first sequence, and the number of sequences; int64 [documents + 1].

    Raises:
        ValueError: As in `read_lengths`.
    """
    header = _read_header(prefix)
    start = _HEADER.size + 12 * header.sequences
    return _column(prefix, "<i8", header.documents + 1, start)


def read_ids(prefix: Path) -> npt.NDArray[np.integer[Any]]:
    """Return all ids of a dataset as a flat, memory-mapped array."""
    header = _read_header(prefix)
    data = Path(f"{prefix}.bin")
    if not data.stat().st_size:
        return np.empty(0, header.dtype)
    return np.memmap(data, dtype=header.dtype, mode="r")


def check_indexed(prefix: Path) -> None:
    """Check an index against itself and against the size of its data.

    Raises:
        ValueError: Something does not match; the message names the file.
    """
    header = _read_header(prefix)
    index, data = f"{prefix}.idx", Path(f"{prefix}.bin")
    lengths = read_lengths(prefix).astype(np.int64)
    sizes = lengths * header.dtype.itemsize
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"{index}: sequence {int(lengths.argmin())} has a negative length")
    if data.stat().st_size != sizes.sum():
        raise ValueError(f"{data}: {data.stat().st_size} bytes, but its index says {sizes.sum()}")
    start = _HEADER.size + 4 * header.sequences
    offsets = _column(prefix, "<i8", header.sequences, start)
    if not np.array_equal(offsets, np.cumsum(sizes) - sizes):
        raise ValueError(f"{index}: the byte offsets do not follow from the lengths")
    bounds = read_document_bounds(prefix)
    if bounds[0] != 0 or bounds[-1] != header.sequences or np.any(np.diff(bounds) < 0):
        raise ValueError(f"{index}: the document bounds do not cover the sequences in order")


@dataclass(frozen=True)
class _Header:
    dtype: np.dtype[Any]
    sequences: int
    documents: int


def _read_header(prefix: Path) -> _Header:
    index = Path(f"{prefix}.idx")
    if not index.is_file():
        raise ValueError(f"{index}: no such file")
    with index.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise ValueError(f"{index}: not a Megatron index (it does not start with {_MAGIC!r})")
    _, version, code, sequences, bounds = _HEADER.unpack(head)
    if version != _VERSION or code not in _TYPE_OF_CODE:
        raise ValueError(
            f"{index}: version {version} with id type {code}; accepted: version {_VERSION} with "
            f"{', '.join(f'{code} ({dtype})' for code, dtype in _TYPE_OF_CODE.items())}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if bounds < 1 or index.stat().st_size != expected:
        raise ValueError(
            f"{index}: {index.stat().st_size} bytes, but its header ({sequences} sequences, "
            f"{bounds} document bounds) requires {expected}"
        )
    return _Header(_TYPE_OF_CODE[code], sequences, bounds - 1)


def _column(prefix: Path, dtype: str, count: int, offset: int) -> npt.NDArray[Any]:
    return np.fromfile(f"{prefix}.idx", dtype=dtype, count=count, offset=offset)
