"""Remove near-duplicates across all inputs of a corpus by MinHash and LSH; the first one stays.

Two texts are near-duplicates if the Jaccard similarity of their sets of n-grams of words
(words.py) is at least `Settings.near_duplicates` (Broder 1997; Lee et al. 2022 take 5-grams and
0.8). A text of fewer than n words is one n-gram. The similarity is estimated from 256 hashes per
document; the estimate's standard error is about 0.025 at 0.8.

1. `sign_input`, once per input, in any order and on any machine, writes 256 bytes per document to
   shards/shard-NNNNN.signatures (see `signature`). It encodes nothing.
2. `mark_near_duplicates`, when all signatures are there, compares the documents whose signatures
   agree in a band of 8 bytes, or of 4 if the threshold is below `_LOW` (LSH). It writes one bit per
   document to shards/shard-NNNNN.near-duplicates, set if the document is estimated to be similar to
   an earlier one in this or an earlier shard.
3. `near_duplicates`, while a shard is made, tells which documents are marked.

Of the documents that agree in a band, the first is compared with all others, then the first of
those that are not similar to it with the rest, and so on, at most `_ROUNDS` times. A marked
document is left out of later bands. As similarity is not transitive, the earlier document that one
is marked for may itself be marked for a third.

The result depends on the order of the inputs, not on the number of workers. Memory of step 1: 25
MB beside the input's reader. Memory of step 2: as in duplicates.py, and 100 MB for the signatures
that are compared at once. The signatures of the Pile's 210 million documents take 54 GB of disk
until the corpus is finished.
"""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep import duplicates
from data_prep.documents import Verdict
from data_prep.duplicates import (
    BLOCK_DOCUMENTS,
    STAMP_BYTES,
    checked_file,
    first_numbers,
    is_in_part,
    marked,
    stamp,
    write_keys,
    write_marks,
)
from data_prep.progress import Progress
from data_prep.task import ShardTask
from data_prep.words import Hashes, mixed, ngram_hashes, random_numbers, word_hashes

SIGNATURES_SUFFIX = ".signatures"
MARKS_SUFFIX = ".near-duplicates"
_BINS = 256
_BANDS = _BINS // 8  # uint64 in a signature
_LOW = 0.75
"""At this similarity, 97 % of the pairs agree in one of 32 bands of 8; at 0.5, 98 % in one of 64
bands of 4."""
_ROUNDS = 16
_PAIRS = 1 << 16  # compared at once
_NOTHING = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


def sign_input(task: ShardTask, progress: Progress = lambda _: None) -> None:
    """Write the signatures of one input's documents, if they are missing or outdated.

    Raises:
        ValueError: As in `duplicates.hash_input`.
    """
    size = task.settings.near_duplicate_ngram
    key = partial(signature, size=size)
    write_keys(task, SIGNATURES_SUFFIX, stamp(task, size), key, _by_band, progress)


def signature(text: str, size: int) -> bytes:
    """Return 256 bytes, of which two texts share about the Jaccard similarity of their n-grams.

    One-permutation MinHash (Li, Owen and Zhang 2012): the hashes of the n-grams are divided into
    256 bins, and each gives its smallest. An empty bin takes that of a bin that is not (Shrivastava
    2017). The lowest byte of each is kept (Li and König 2010), so unequal ones agree in one of 256.

    Args:
        text: A text without words is one n-gram.
        size: Words of an n-gram.
    """
    words = word_hashes(text)
    if not len(words):
        words = word_hashes("".join(f"u{ord(character)}" for character in text))
    smallest = np.full(_BINS, _NOTHING)
    for hashes in ngram_hashes(words, min(size, len(words))):
        np.minimum.at(smallest, (hashes >> np.uint64(56)).astype(np.intp), hashes)
    is_empty = smallest == _NOTHING
    if is_empty.any():
        filled = np.flatnonzero(~is_empty)
        chosen = _keys()[filled].min(axis=0) & 0xFF
        smallest[is_empty] = smallest[chosen[is_empty]]
    return smallest.astype(np.uint8).tobytes()


def mark_near_duplicates(tasks: Sequence[ShardTask]) -> None:
    """Write which documents of each input are near-duplicates of an earlier one.

    Args:
        tasks: All tasks of the corpus, in the order that decides what is earlier.

    Raises:
        ValueError: An input has no signatures, or has changed since.
    """
    settings = tasks[0].settings
    threshold, size = settings.near_duplicates, settings.near_duplicate_ngram
    assert threshold is not None
    files = [checked_file(task, SIGNATURES_SUFFIX, stamp(task, size)) for task in tasks]
    signatures = _Signatures(files)
    is_duplicate = np.zeros(signatures.firsts[-1], dtype=bool)
    num_parts = -(-len(is_duplicate) // duplicates.PART_DOCUMENTS)
    bytes_in_band = 8 if threshold >= _LOW else 4
    for band in range(_BINS // bytes_in_band):
        for part in range(num_parts):
            values, numbers = signatures.band(band, bytes_in_band, part, num_parts, is_duplicate)
            _mark(values, numbers, signatures, threshold, is_duplicate)
    for task, marks in zip(tasks, np.split(is_duplicate, signatures.firsts[1:-1]), strict=True):
        write_marks(task, MARKS_SUFFIX, stamp(task, size, threshold), marks)


def near_duplicates(task: ShardTask) -> Verdict:
    """Return the filter of a task's documents.

    Raises:
        ValueError: The near-duplicates were not marked, or the input has changed since.
    """
    settings = task.settings
    made_of = stamp(task, settings.near_duplicate_ngram, settings.near_duplicates)
    return marked(task, MARKS_SUFFIX, made_of, "near-duplicate")


def least_equal(threshold: float) -> int:
    """Return how many of the 256 bytes two texts of this similarity share on average."""
    return int(np.ceil(_BINS * (threshold + (1 - threshold) / 256) - 1e-9))


@cache
def _keys() -> npt.NDArray[np.uint16]:
    """Return rank * 256 + other, [other, bin]; a bin takes the value of the lowest."""
    numbers = random_numbers("bins", _BINS**2).reshape(_BINS, _BINS)
    ranks = numbers.argsort(axis=0).argsort(axis=0).astype(np.uint16)
    return ranks << np.uint16(8) | np.arange(_BINS, dtype=np.uint16)[:, None]


def _by_band(signatures: list[bytes]) -> bytes:
    """Return a block of signatures as it is stored: uint64 [band, document]."""
    return np.frombuffer(b"".join(signatures), "<u8").reshape(-1, _BANDS).T.tobytes()


def _mark(
    values: Hashes,
    numbers: npt.NDArray[np.int64],
    signatures: "_Signatures",
    threshold: float,
    is_duplicate: npt.NDArray[np.bool_],
) -> None:
    """Mark the documents that are similar to an earlier one with an equal value."""
    order = np.argsort(values, kind="stable")  # of equal values the first stays the first
    values, numbers = values[order], numbers[order]
    for _ in range(_ROUNDS):
        is_first = np.append(True, values[1:] != values[:-1])[: len(values)]
        later = np.flatnonzero(~is_first)
        if not len(later):
            return
        leaders = np.flatnonzero(is_first)[np.cumsum(is_first)[later] - 1]
        equal = signatures.count_equal(numbers[leaders], numbers[later])
        is_similar = equal >= least_equal(threshold)
        is_duplicate[numbers[later[is_similar]]] = True
        left = later[~is_similar]
        values, numbers = values[left], numbers[left]


class _Signatures:
    """The signatures of all inputs' documents, numbered through in the order of the inputs."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.firsts = first_numbers(files, _BINS)

    def band(
        self,
        band: int,
        bytes_in_band: int,
        part: int,
        num_parts: int,
        left_out: npt.NDArray[np.bool_],
    ) -> tuple[Hashes, npt.NDArray[np.int64]]:
        """Return the values of a band that belong to a part, and the numbers of their documents."""
        column, rest = divmod(band * bytes_in_band, 8)
        found, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for file, first, end in zip(self._files, self.firsts[:-1], self.firsts[1:], strict=True):
            for start in range(0, end - first, BLOCK_DOCUMENTS):
                count = min(BLOCK_DOCUMENTS, end - first - start)
                offset = STAMP_BYTES + start * _BINS + column * count * 8
                values = np.fromfile(file, dtype="<u8", count=count, offset=offset)
                if bytes_in_band == 4:
                    values = values >> np.uint64(8 * rest) & np.uint64(0xFFFF_FFFF)
                values = mixed(values)
                is_chosen = is_in_part(values, part, num_parts)
                is_chosen &= ~left_out[first + start : first + start + count]
                chosen = np.flatnonzero(is_chosen)
                found.append(values[chosen])
                numbers.append(chosen + first + start)
        return np.concatenate(found), np.concatenate(numbers)

    def count_equal(
        self, some: npt.NDArray[np.int64], others: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return how many bytes the signatures of each pair of documents share."""
        counts = [np.empty(0, np.int64)]
        for start in range(0, len(some), _PAIRS):
            pair = (self._of(numbers[start : start + _PAIRS]) for numbers in (some, others))
            counts.append(np.equal(*pair).sum(axis=1))
        return np.concatenate(counts)

    def _of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return the signatures of some documents, uint8 [document, 256]."""
        found = np.empty((len(numbers), _BANDS), "<u8")
        inputs = np.searchsorted(self.firsts, numbers, side="right") - 1
        for number in np.unique(inputs):
            rows = np.flatnonzero(inputs == number)
            first, end = self.firsts[number], self.firsts[number + 1]
            block, place = np.divmod(numbers[rows] - first, BLOCK_DOCUMENTS)
            count = np.minimum(BLOCK_DOCUMENTS, end - first - block * BLOCK_DOCUMENTS)
            columns = block * BLOCK_DOCUMENTS * _BANDS + place
            stored = np.memmap(self._files[number], "<u8", mode="r", offset=STAMP_BYTES)
            found[rows] = stored[columns[:, None] + count[:, None] * np.arange(_BANDS)]
        return found.view(np.uint8)
