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

import struct
import sys
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from data_prep.common.files import AtomicFile, FileRecord

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


class IndexedReader:
    """A dataset, memory-mapped. Arrays that it returns are read-only views and may outlive it."""

    def __init__(self, prefix: Path) -> None:
        """Open a dataset and check its index against itself and the size of its data.

        Args:
            prefix: Path without `.bin` and `.idx`.

        Raises:
            ValueError: A file is missing, of another format or version, or the index is damaged.
                The message names the file, the sequence or document, and the value.
        """
        header = _read_header(prefix)
        index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        if not data.is_file():
            raise ValueError(f"{data}: no such file, but {index.name} exists")
        start = _HEADER.size
        self.lengths: npt.NDArray[np.int32] = _mapped(index, "<i4", start, header.sequences)
        """Number of ids in each sequence; int32 [sequences]."""
        start += 4 * header.sequences
        self.offsets: npt.NDArray[np.int64] = _mapped(index, "<i8", start, header.sequences)
        """Place of each sequence in the data, in bytes; int64 [sequences]."""
        start += 8 * header.sequences
        self.bounds: npt.NDArray[np.int64] = _mapped(index, "<i8", start, header.documents + 1)
        """First sequence of each document, and the number of sequences; int64 [documents + 1]."""
        _check(index, data, header.dtype, self.lengths, self.offsets, self.bounds)
        size = data.stat().st_size // header.dtype.itemsize
        self.ids: npt.NDArray[np.integer[Any]] = _mapped(data, header.dtype, 0, size)
        """All ids; [ids]."""

    def __getitem__(self, number: int) -> npt.NDArray[np.integer[Any]]:
        """Return the ids of a sequence."""
        return self.ids[self.span(number, number + 1)]

    def span(self, first: int, end: int) -> slice:
        """Return the places in `ids` of the sequences [first, end), at least one."""
        stop = int(self.offsets[end - 1]) // self.ids.itemsize + int(self.lengths[end - 1])
        return slice(int(self.offsets[first]) // self.ids.itemsize, stop)


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


def _mapped(file: Path, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
    if not count:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    # The base class: making a slice of a numpy.memmap takes ten times as long.
    return np.asarray(np.memmap(file, dtype, mode="r", offset=offset, shape=(count,)))


def _check(
    index: Path,
    data: Path,
    dtype: np.dtype[Any],
    lengths: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
) -> None:
    """Check an index against itself and against the size of its data.

    Raises:
        ValueError: Something does not match.
    """
    place = 0
    for first in range(0, len(lengths), _WINDOW):
        sizes = lengths[first : first + _WINDOW].astype(np.int64) * dtype.itemsize
        ends = place + np.cumsum(sizes)
        if (is_bad := sizes < 0).any():
            bad = int(is_bad.argmax())
            raise ValueError(
                f"{index}: sequence {first + bad} has the length {lengths[first + bad]}; accepted: "
                "0 or more"
            )
        if (is_bad := offsets[first : first + _WINDOW] != ends - sizes).any():
            bad = int(is_bad.argmax())
            raise ValueError(
                f"{index}: sequence {first + bad} has the offset {offsets[first + bad]}, but the "
                f"lengths before it sum to {ends[bad] - sizes[bad]} bytes"
            )
        place = int(ends[-1])
    if (size := data.stat().st_size) != place:
        raise ValueError(f"{data}: {size} bytes, but its index says {place}")
    if bounds[0] != 0 or bounds[-1] != len(lengths) or np.any(bounds[1:] <= bounds[:-1]):
        raise ValueError(
            f"{index}: the documents' first sequences do not ascend from 0 to {len(lengths)}"
        )


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
