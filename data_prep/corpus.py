"""Read a prepared folder as a sequence of documents, for training and evaluation."""

import bisect
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep import cache
from data_prep.indexed import Ids, IndexedReader
from data_prep.manifest import SPLITS, CorpusManifest, ShardFiles, load_manifest
from data_prep.tokenizer import Tokenizer


class Corpus:
    """The documents of one split, in the order of the shards, that is of the inputs.

    Shards are opened when they are first read, so that a corpus is cheap to create, pickle and
    fork.
    """

    def __init__(self, folder: Path, split: str) -> None:
        """Read the manifest.

        Args:
            folder: A folder written by `data_prep prepare`.
            split: "train" or "valid".

        Raises:
            ValueError: The folder does not exist, the prepare is unfinished, or the split has no
                documents.
        """
        self.folder = Path(folder)
        self.split = split
        self.manifest: CorpusManifest = load_manifest(self.folder)
        self._shards = self.manifest.shards[split]
        if not self._shards:
            (other,) = {*SPLITS} - {split}
            raise ValueError(
                f"{folder}: the {split} split is empty ({other} has "
                f"{self.manifest.totals[other].documents} documents; "
                f"valid-fraction was {self.manifest.settings.valid_fraction})"
            )
        # Index of the first document of each shard, and the number of documents.
        self._firsts = [0, *accumulate(files.documents for files in self._shards)]
        self._open: dict[int, IndexedReader] = {}

    def __len__(self) -> int:
        """Number of documents."""
        return self._firsts[-1]

    @property
    def tokens(self) -> int:
        """Tokens of all documents, including their final `</s>`."""
        return sum(files.tokens for files in self._shards)

    @cached_property
    def lengths(self) -> cache.Table:
        """Tokens of each document, including the final `</s>`; int32 [documents].

        Raises:
            ValueError: As `cache.tables`, which keeps them.
        """
        name, digest = f"{self.split}-lengths", self.manifest.digest()
        return cache.tables(self.folder, digest, name, self.count_lengths)["lengths"]

    def count_lengths(self) -> cache.Tables:
        """Count the tokens of each document from the indexes of the shards."""
        readers = map(self._reader, range(len(self._shards)))
        # reduceat needs a sequence per document; each has one, because of its `</s>`.
        counts = [
            np.add.reduceat(each.lengths, each.bounds[:-1], dtype=np.int32) for each in readers
        ]
        return {"lengths": np.concatenate(counts)}

    @cached_property
    def subsets(self) -> npt.NDArray[np.uint8]:
        """Index of each document's subset in `manifest.subsets`; uint8 [documents]."""
        number, found = self.manifest.subsets.index, []
        for files in self._shards:
            numbers = np.array([*map(number, files.subsets)], np.uint8)
            found.append(numbers[subset_numbers(self.folder, files)])
        return np.concatenate(found)

    def document(self, index: int, first: int = 0, end: int | None = None) -> Ids:
        """Return the ids [first, end) of a document, including the final `</s>`; a read-only view.

        Raises:
            ValueError: An id is not in the vocabulary; the file and the document are named.
        """
        reader, begin, last = self._sequences(index)
        return self._checked(reader.ids[reader.span(begin, last)][first:end], index)

    def sentences(self, index: int, first: int = 0, end: int | None = None) -> list[Ids]:
        """Return the sentences [first, end) of a document, without the final `</s>`.

        The concatenation of all sentences followed by `</s>` is `document(index)`.

        Raises:
            ValueError: The corpus was prepared without --sentences, or as in `document`.
        """
        self._check_documents()
        reader, begin, last = self._sequences(index)
        chosen = range(begin, last)[first:end]
        found = (self._checked(reader[number], index) for number in chosen)
        return [text for ids in found if (text := ids[ids != Tokenizer.eos_id]).size]

    def sentence_lengths(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the lengths of all sentences, found without reading them.

        Returns:
            Tokens of each sentence, without the final `</s>` of a document, int32 [sentences]; the
            first sentence of each document, and the number of sentences, int64 [documents + 1]. An
            empty document has one sentence of length 0.

        Raises:
            ValueError: The corpus was prepared without --sentences.
        """
        self._check_documents()
        readers = [self._reader(shard) for shard in range(len(self._shards))]
        lengths = np.concatenate([reader.lengths for reader in readers])
        counts = [np.diff(reader.bounds) for reader in readers]
        bounds = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        lengths[bounds[1:] - 1] -= 1
        return lengths, bounds

    def _check_documents(self) -> None:
        if self.manifest.settings.unit != "sentence":
            raise ValueError(
                f"{self.folder}: its sequences are documents; prepare the corpus with --sentences"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what can be read from the disk again."""
        left_out = ("lengths", "subsets")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        return state | {"_open": {}}

    def _sequences(self, index: int) -> tuple[IndexedReader, int, int]:
        """Return the shard of a document, its first sequence there, and the one after its last."""
        if not 0 <= index < len(self):
            raise IndexError(
                f"document {index} of {self.folder} {self.split}, which has {len(self)}"
            )
        shard = bisect.bisect_right(self._firsts, index) - 1
        number = int(index) - self._firsts[shard]
        reader = self._reader(shard)
        return reader, int(reader.bounds[number]), int(reader.bounds[number + 1])

    def _checked(self, ids: Ids, index: int) -> Ids:
        """Return the ids of a document, or refuse them where the vocabulary lacks one."""
        vocab_size = self.manifest.vocab_size
        if unsigned(ids).max(initial=0) >= vocab_size:
            shard = bisect.bisect_right(self._firsts, index) - 1
            raise ValueError(
                f"{self.folder / self._shards[shard].stem}.bin: document "
                f"{index - self._firsts[shard]} has id {ids[unsigned(ids).argmax()]}; accepted: "
                f"0 to {vocab_size - 1}, as the vocabulary has {vocab_size} ids"
            )
        return ids

    def _reader(self, shard: int) -> IndexedReader:
        if shard not in self._open:
            self._open[shard] = open_shard(self.folder, self._shards[shard], self.manifest.dtype)
        return self._open[shard]


def open_shard(folder: Path, files: ShardFiles, dtype: str) -> IndexedReader:
    """Open the ids of a shard.

    Raises:
        ValueError: The index is damaged, or is not the one that the manifest describes.
    """
    reader = IndexedReader(folder / files.stem)
    lengths, ids = reader.lengths, reader.ids
    found = (len(reader.bounds) - 1, len(lengths), len(ids), str(ids.dtype))
    expected = (files.documents, files.sequences, files.tokens, dtype)
    if found != expected:
        described = "{} documents, {} sequences and {} tokens as {}".format
        both = f"{described(*found)}, but the manifest has {described(*expected)}"
        raise ValueError(f"{folder / files.stem}.idx: {both}")
    return reader


def subset_numbers(folder: Path, files: ShardFiles) -> npt.NDArray[np.uint8]:
    """Return the index of each document's subset in `files.subsets`; uint8 [documents].

    Raises:
        ValueError: The file is missing, or is not the one that the manifest describes.
    """
    file = folder / f"{files.stem}.subsets"
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    numbers = np.fromfile(file, dtype=np.uint8)
    found = (len(numbers), int(numbers.max(initial=0)) + 1)
    if found[0] != files.documents or found[1] > len(files.subsets):
        raise ValueError(
            f"{file}: {found[0]} documents of {found[1]} subsets, but the manifest has "
            f"{files.documents} of {len(files.subsets)}"
        )
    return numbers


def unsigned(ids: Ids) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return a view in which a negative id is one that is too large."""
    return ids.view(f"u{ids.itemsize}")
