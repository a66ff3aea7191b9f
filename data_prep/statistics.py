"""Numbers of a corpus."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.files import FileRecord, write_atomically
from data_prep.manifest import LengthHistogram

# Four buckets an octave, up to 2^31 tokens; powers of two are edges, so that shares over them are
# exact.
_ROUNDED = np.round(2 ** (np.arange(4, 4 * 31 + 1) / 4)).astype(np.int64)
UPPER_EDGES = _ROUNDED[np.diff(_ROUNDED, prepend=0) > 0]  # np.unique would import numpy.ma


def count_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Documents by bucket of `UPPER_EDGES`, each of which belongs to its own bucket."""
    buckets = np.searchsorted(UPPER_EDGES, np.asarray(lengths), side="left")
    return np.bincount(buckets, minlength=len(UPPER_EDGES))


def length_histogram(counts: npt.NDArray[np.int64]) -> LengthHistogram:
    """The histogram of such counts, up to the longest document, with the shares of long ones."""
    used = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    return LengthHistogram(
        upper_edges=[int(edge) for edge in UPPER_EDGES[:used]],
        counts=[int(count) for count in counts[:used]],
        share_over_1024=_share_over(1024, counts),
        share_over_2048=_share_over(2048, counts),
    )


def count_ids(prefixes: Iterable[Path], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each id occurs in the datasets, `</s>` included: the sum of their `.counts`."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for prefix in prefixes:
        ids, numbers = np.fromfile(counts_file(prefix), dtype="<i8").reshape(-1, 2).T
        counts[ids] += numbers
    return counts


def write_counts(prefix: Path, counts: npt.NDArray[np.int64]) -> FileRecord:
    """Write how often each id occurs: for each that does, two little-endian int64, id and count."""
    ids = np.flatnonzero(counts)
    pairs = np.column_stack([ids, counts[ids]]).astype("<i8")
    return write_atomically(counts_file(prefix), pairs.tobytes())


def counts_file(prefix: Path) -> Path:
    """Where the counts of a dataset lie."""
    return prefix.with_name(f"{prefix.name}.counts")


def unigram_perplexity(
    train_counts: npt.NDArray[np.int64], valid_counts: npt.NDArray[np.int64]
) -> float | None:
    """Perplexity of the validation ids under the add-one-smoothed distribution of the training ids.

    What a model scores that knows how frequent each token is and nothing else. None where a split
    is empty.
    """
    if not train_counts.sum() or not valid_counts.sum():
        return None
    probabilities = (train_counts + 1) / (train_counts.sum() + len(train_counts))
    loss_nats = -np.sum(valid_counts * np.log(probabilities)) / valid_counts.sum()
    return float(np.exp(loss_nats))


def _share_over(limit: int, counts: npt.NDArray[np.int64]) -> float:
    total = int(counts.sum())
    return float(counts[np.greater(UPPER_EDGES, limit)].sum() / total) if total else 0.0
