"""Statistics of a corpus: document lengths, id counts, unigram perplexity."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.common.files import FileRecord, naming_damage, write_atomically
from data_prep.manifest import LengthHistogram

# Four buckets per octave up to 2^31 tokens. Powers of two are edges, so that the shares of
# documents over them are exact.
_ROUNDED = np.round(2 ** (np.arange(4, 4 * 31 + 1) / 4)).astype(np.int64)
UPPER_EDGES = _ROUNDED[np.diff(_ROUNDED, prepend=0) > 0]  # np.unique would import numpy.ma


def count_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Count documents by bucket; a length equal to an upper edge belongs to that bucket."""
    buckets = np.searchsorted(UPPER_EDGES, np.asarray(lengths), side="left")
    return np.bincount(buckets, minlength=len(UPPER_EDGES))


def length_histogram(counts: npt.NDArray[np.int64]) -> LengthHistogram:
    """Return the histogram of the counts of a document or more, cut off after the longest one."""
    used = len(np.trim_zeros(counts, "b"))
    return LengthHistogram(
        upper_edges=UPPER_EDGES[:used].tolist(),
        counts=counts[:used].tolist(),
        share_over_1024=float(counts[np.greater(UPPER_EDGES, 1024)].sum() / counts.sum()),
        share_over_2048=float(counts[np.greater(UPPER_EDGES, 2048)].sum() / counts.sum()),
    )


def count_ids(prefixes: Iterable[Path], vocab_size: int) -> npt.NDArray[np.int64]:
    """Count each id in the datasets, including `</s>`: the sum of their `.counts` files.

    Raises:
        ValueError: A file is damaged; it is named.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for file in (Path(f"{prefix}.counts") for prefix in prefixes):
        with naming_damage(file):
            ids, numbers = np.fromfile(file, dtype="<i8").reshape(-1, 2).T
            counts[ids] += numbers
    return counts


def write_counts(prefix: Path, counts: npt.NDArray[np.int64]) -> FileRecord:
    """Write id and count, two little-endian int64, for each id that occurs in a dataset."""
    ids = np.flatnonzero(counts)
    pairs = np.column_stack([ids, counts[ids]]).astype("<i8")
    return write_atomically(Path(f"{prefix}.counts"), pairs.tobytes())


def unigram_perplexity(
    train_counts: npt.NDArray[np.int64], valid_counts: npt.NDArray[np.int64]
) -> float | None:
    """Return the perplexity of the validation ids under a unigram model of the training ids.

    The model uses add-one smoothing. Returns None if a split is empty.
    """
    if not train_counts.sum() or not valid_counts.sum():
        return None
    probabilities = (train_counts + 1) / (train_counts.sum() + len(train_counts))
    loss_nats = -np.sum(valid_counts * np.log(probabilities)) / valid_counts.sum()
    return float(np.exp(loss_nats))
