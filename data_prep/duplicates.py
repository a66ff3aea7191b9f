"""Exact duplicates over all inputs of a corpus: the first of equal texts stays.

1. `hash_input`, for each input, anywhere and in any order: 16 bytes of BLAKE2b of each document's
   text go to shards/shard-NNNNN.hashes. It reads and hashes, and encodes nothing.
2. `mark_duplicates`, once all are there: shards/shard-NNNNN.duplicates has a bit for each document,
   set where an equal text came before, in the same shard or in one that comes before.
3. `drop_duplicates`, as a shard is made: the marked documents become rejects.

What stays depends on the order of the inputs alone, not on workers. Both kinds of file begin with
16 bytes that say which input, in which state, they speak of, so that stale ones are noticed: a
rerun hashes again what has changed and nothing else.

Memory of step 2: a byte for each document, and about 70 for each of the `_PART_DOCUMENTS` whose
hashes are looked at together; for the Pile's 210 million documents 0.6 GB, and about three minutes.
Step 3 takes a byte for each document of its shard.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_prep.documents import Document, Records, Reject, read
from data_prep.files import AtomicFile, write_atomically
from data_prep.inputs import input_state

if TYPE_CHECKING:
    from data_prep.shard import ShardTask

HASHES_SUFFIX = ".hashes"
MARKS_SUFFIX = ".duplicates"
_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_STAMP_BYTES = 16
_PART_DOCUMENTS = 4_000_000
_CHUNK_DOCUMENTS = 1 << 20


def hash_input(task: "ShardTask", progress: Callable[[int, int], None] = lambda *_: None) -> int:
    """Write the hashes of one input's documents, or leave them where they stand.

    Returns:
        The number of documents.

    Raises:
        ValueError: The input is damaged (and `task.settings.damaged` is "fail"), or changed while
            it was read; nothing is left then.
    """
    file, stamp = _file(task, HASHES_SUFFIX), _stamp(task)
    if _speaks_of(file, stamp):
        return _count(file)
    output = AtomicFile(file)
    try:
        output.write(stamp)
        documents = text_bytes = 0
        for text in _texts(task):
            output.write(hashlib.blake2b(text, digest_size=_HASH.itemsize).digest())
            documents, text_bytes = documents + 1, text_bytes + len(text)
            if not documents % 256:
                progress(documents, text_bytes)
        progress(documents, text_bytes)
        if _stamp(task) != stamp:
            raise ValueError(f"{task.input}: changed while it was read")
        output.commit()
    finally:
        output.discard()
    return documents


def mark_duplicates(tasks: Sequence["ShardTask"]) -> int:
    """Write which documents have come before, for each input of a corpus.

    Args:
        tasks: All of the corpus; of equal texts the one in the first of these tasks stays.

    Returns:
        The number of duplicates.

    Raises:
        ValueError: An input was not hashed, or has changed since.
    """
    for task in tasks:
        _check(task, HASHES_SUFFIX)
    files = [_file(task, HASHES_SUFFIX) for task in tasks]
    firsts = np.cumsum([0, *map(_count, files)])
    is_duplicate = np.zeros(firsts[-1], dtype=bool)
    num_parts = -(-len(is_duplicate) // _PART_DOCUMENTS)
    for part in range(num_parts):
        hashes, numbers = _part(files, part, num_parts)
        is_duplicate[numbers[_later_of_equal(hashes)]] = True
    for task, first, end in zip(tasks, firsts[:-1], firsts[1:], strict=True):
        bits = np.packbits(is_duplicate[first:end]).tobytes()
        write_atomically(_file(task, MARKS_SUFFIX), _stamp(task) + bits)
    return int(is_duplicate.sum())


def drop_duplicates(records: Records, task: "ShardTask") -> Records:
    """The records of a task's input with the marked documents made into rejects.

    Raises:
        ValueError: The duplicates were not sought, or the input has changed since.
    """
    _check(task, MARKS_SUFFIX)
    bits = np.fromfile(_file(task, MARKS_SUFFIX), dtype=np.uint8, offset=_STAMP_BYTES)
    return _rejected(records, np.unpackbits(bits).tobytes())


def _rejected(records: Records, marks: bytes) -> Records:
    unread = iter(marks)
    for record in records:
        if isinstance(record, Document) and next(unread, 0):
            yield Reject("duplicate", record.subset, record.source_file, record.line)
        else:
            yield record


def _texts(task: "ShardTask") -> Iterator[bytes]:
    records = read(task.input, [] if task.settings.damaged == "keep" else None)
    return (record.text.encode() for record in records if isinstance(record, Document))


def _part(
    files: Sequence[Path], part: int, num_parts: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The hashes whose leading bits fall into a part, and their documents' numbers, ascending."""
    hashes, numbers = [np.empty(0, _HASH)], [np.empty(0, np.int64)]
    first = 0
    for file in files:
        for offset in range(_STAMP_BYTES, file.stat().st_size, _CHUNK_DOCUMENTS * _HASH.itemsize):
            chunk = np.fromfile(file, dtype=_HASH, count=_CHUNK_DOCUMENTS, offset=offset)
            chosen = np.flatnonzero((chunk["high"] >> 32) * num_parts >> 32 == part)
            hashes.append(chunk[chosen])
            numbers.append(chosen + first)
            first += len(chunk)
    return np.concatenate(hashes), np.concatenate(numbers)


def _later_of_equal(hashes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Indices of those that equal one before them."""
    # A stable order: the first of equal ones stays the first.
    order: npt.NDArray[np.int64] = np.lexsort((hashes["low"], hashes["high"]))
    ordered = hashes[order]
    repeats: npt.NDArray[np.bool_] = ordered[1:] == ordered[:-1]
    return order[1:][repeats]


def _file(task: "ShardTask", suffix: str) -> Path:
    return task.manifest_file.with_suffix(suffix)


def _count(hash_file: Path) -> int:
    return (hash_file.stat().st_size - _STAMP_BYTES) // _HASH.itemsize


def _stamp(task: "ShardTask") -> bytes:
    state = f"{task.input} {input_state(task.input)} {task.settings.damaged}"
    return hashlib.blake2b(state.encode(), digest_size=_STAMP_BYTES).digest()


def _speaks_of(file: Path, stamp: bytes) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(_STAMP_BYTES) == stamp


def _check(task: "ShardTask", suffix: str) -> None:
    if not _speaks_of(file := _file(task, suffix), _stamp(task)):
        raise ValueError(
            f"{file}: missing, or made before {task.input} changed; run prepare from its beginning"
        )
