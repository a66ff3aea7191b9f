r"""Megatron's indexed format, and the only file that knows it.

    prefix.bin   the ids of all sequences, one after another
    prefix.idx   b"MMIDIDX\0\0", u64 version 1, u8 code of the id type
                 u64 sequences, u64 documents + 1
                 i32 length of each sequence, in ids
                 i64 offset of each sequence in prefix.bin, in bytes
                 i64 first sequence of each document, and the number of sequences

Little-endian, no padding. A sequence is a document, or one of its sentences. The writer needs numpy
alone, so that a worker starts at once, and gives the same bytes as megatron-core's
`IndexedDatasetBuilder`; ids are read through megatron-core.

Order: layout, writer, readers, check.
"""

import struct
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from data_prep.files import AtomicFile, FileRecord

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
# Codes of megatron.core.datasets.indexed_dataset.DType; the others hold no token ids.
_TYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("int16"),
    4: np.dtype("int32"),
    5: np.dtype("int64"),
    8: np.dtype("uint16"),
}
_CODE_OF_TYPE = {dtype: code for code, dtype in _TYPE_OF_CODE.items()}
_WINDOW = 1 << 20  # entries handled at a time where a whole column need not be in memory


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The id type for a vocabulary, by Megatron's rule: uint16 below 65500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """Writes one dataset, document by document; nothing stands under its final name before `close`.

    As a context manager it closes on success and leaves nothing on an exception. Memory: 4 bytes a
    sequence and 4 a document.
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike, vocab_size: int | None = None) -> None:
        """Start a dataset.

        Args:
            prefix: Path without `.bin` and `.idx`.
            dtype: Id type, as from `dtype_for`.
            vocab_size: Ids from here on are refused; by default what `dtype` can hold.
        """
        self._dtype = np.dtype(dtype)
        if self._dtype not in _CODE_OF_TYPE:
            raise ValueError(f"{prefix}: ids of type {self._dtype}; accepted: {_type_names()}")
        capacity = int(np.iinfo(self._dtype).max) + 1
        self._limit = capacity if vocab_size is None else min(vocab_size, capacity)
        self._prefix = prefix
        self._lengths = array("i")  # of sequences
        self._sequences = array("i")  # of documents
        self._data = AtomicFile(_file(prefix, ".bin"))

    @property
    def documents(self) -> int:
        """Documents appended so far."""
        return len(self._sequences)

    @property
    def sequences(self) -> int:
        """Sequences appended so far."""
        return len(self._lengths)

    def append(self, ids: npt.NDArray[np.integer[Any]]) -> None:
        """Append one document as one sequence.

        Raises:
            ValueError: An id is negative or not below the limit (a cast would wrap it silently).
        """
        self.extend(ids, [ids.size])

    def extend(
        self,
        ids: npt.NDArray[np.integer[Any]],
        lengths: Sequence[int],
        sequences: Sequence[int] | None = None,
    ) -> None:
        """Append documents; much faster than one after another.

        Args:
            ids: Those of all documents, one after another.
            lengths: How many of them each sequence has.
            sequences: How many sequences each document has; by default one.

        Raises:
            ValueError: As for `append`; no document is written then.
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
        """Write the index and give both files their names; returns their records, .bin first."""
        index = AtomicFile(_file(self._prefix, ".idx"))
        try:
            for piece in self._index_pieces():
                index.write(piece)
            return self._data.commit(), index.commit()
        finally:
            index.discard()

    def discard(self) -> None:
        """Drop what was written; harmless after `close`."""
        self._data.discard()

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, or discard when the block raised."""
        if kind is None:
            self.close()
        else:
            self.discard()

    def _index_pieces(self) -> Iterator[bytes]:
        count = self.sequences
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if count else np.empty(0, np.int32)
        yield _HEADER.pack(_MAGIC, _VERSION, _CODE_OF_TYPE[self._dtype], count, self.documents + 1)
        yield lengths.astype("<i4").tobytes()
        offset = 0
        for start in range(0, count, _WINDOW):
            sizes = lengths[start : start + _WINDOW].astype(np.int64) * self._dtype.itemsize
            ends = offset + np.cumsum(sizes)
            yield (ends - sizes).astype("<i8").tobytes()
            offset = int(ends[-1])
        first = 0
        yield bytes(8)
        for start in range(0, self.documents, _WINDOW):
            ends = first + np.cumsum(self._sequences[start : start + _WINDOW], dtype=np.int64)
            yield ends.astype("<i8").tobytes()
            first = int(ends[-1])


def open_indexed(prefix: Path) -> "IndexedDataset":
    """Open a dataset through megatron-core, memory-mapped.

    Arrays that it hands out are views of the map: they must not outlive the dataset (megatron-core
    unmaps the file in `__del__`, after which reading them ends the process). Imports torch and
    megatron-core, about 3 s.

    Raises:
        ValueError: A file is missing, damaged, or of another size than its index says.
    """
    _read_header(prefix)
    data = _file(prefix, ".bin")
    if not data.is_file():
        raise ValueError(f"{data}: no such file, though {prefix.name}.idx is there")
    # An empty file cannot be mapped.
    return import_megatron().IndexedDataset(str(prefix), mmap=data.stat().st_size > 0)


def import_megatron() -> ModuleType:
    """megatron-core's module of the format, imported without its warnings."""
    with warnings.catch_warnings():
        # Neither Transformer Engine nor Apex matters for reading files, nor what is to be removed.
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|megatron)\.")
        return import_module("megatron.core.datasets.indexed_dataset")


def read_lengths(prefix: Path) -> npt.NDArray[np.int32]:
    """The number of ids of each sequence, straight from the index.

    Raises:
        ValueError: The index is missing, of another format or version, or its size contradicts its
        header.
    """
    header = _read_header(prefix)
    return _column(prefix, "<i4", header.sequences, _HEADER.size)


def read_document_bounds(prefix: Path) -> npt.NDArray[np.int64]:
    """The first sequence of each document, and the number of sequences; int64 [documents + 1].

    Raises:
        ValueError: As for `read_lengths`.
    """
    header = _read_header(prefix)
    start = _HEADER.size + 12 * header.sequences
    return _column(prefix, "<i8", header.documents + 1, start)


def read_ids(prefix: Path) -> npt.NDArray[np.integer[Any]]:
    """All ids of a dataset as one flat, memory-mapped array."""
    header = _read_header(prefix)
    data = _file(prefix, ".bin")
    if not data.stat().st_size:
        return np.empty(0, header.dtype)
    return np.memmap(data, dtype=header.dtype, mode="r")


def check_indexed(prefix: Path) -> None:
    """Check an index against itself and against the size of its data.

    Raises:
        ValueError: Naming the file and what does not fit.
    """
    header = _read_header(prefix)
    index, data = _file(prefix, ".idx"), _file(prefix, ".bin")
    lengths = read_lengths(prefix).astype(np.int64)
    sizes = lengths * header.dtype.itemsize
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"{index}: sequence {int(lengths.argmin())} has a negative length")
    if data.stat().st_size != sizes.sum():
        raise ValueError(
            f"{data}: {data.stat().st_size} bytes, but its index speaks of {sizes.sum()}"
        )
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
    index = _file(prefix, ".idx")
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
            f"{bounds} document bounds) speaks of {expected}"
        )
    return _Header(_TYPE_OF_CODE[code], sequences, bounds - 1)


def _column(prefix: Path, dtype: str, count: int, offset: int) -> npt.NDArray[Any]:
    return np.fromfile(_file(prefix, ".idx"), dtype=dtype, count=count, offset=offset)


def _file(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _type_names() -> str:
    return ", ".join(str(dtype) for dtype in _CODE_OF_TYPE)
