"""Read a prepared folder as a sequence of documents, for training and evaluation."""

import bisect
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_prep.indexed import open_indexed, read_document_bounds, read_lengths
from data_prep.manifest import SPLITS, CorpusManifest, ShardFiles, load_manifest
from data_prep.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset


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
            ValueError: The folder or split does not exist, the prepare is unfinished, or the split
                has no documents.
        """
        if split not in SPLITS:
            raise ValueError(f"split {split!r}: accepted: {', '.join(SPLITS)}")
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
        self._open: dict[int, IndexedDataset] = {}

    def __len__(self) -> int:
        """Number of documents."""
        return self._firsts[-1]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each document, including the final `</s>`; int32 [documents]."""
        return np.concatenate([self._shard_lengths(files) for files in self._shards])

    @cached_property
    def subsets(self) -> npt.NDArray[np.uint8]:
        """Index of each document's subset in `manifest.subsets`; uint8 [documents]."""
        return np.concatenate([self._shard_subsets(files) for files in self._shards])

    def document(
        self, index: int, first: int = 0, end: int | None = None
    ) -> npt.NDArray[np.integer[Any]]:
        """Return a copy of the ids [first, end) of a document, including the final `</s>`.

        A view would not be safe: megatron-core unmaps the file when its dataset is collected, and
        reading the view then ends the process.
        """
        sequences = self._sequences(index)
        ids = sequences[0] if len(sequences) == 1 else np.concatenate(sequences)
        return ids[first:end].copy()

    def sentences(
        self, index: int, first: int = 0, end: int | None = None
    ) -> list[npt.NDArray[np.integer[Any]]]:
        """Return copies of the sentences [first, end) of a document, without the final `</s>`.

        The concatenation of all sentences followed by `</s>` is `document(index)`.

        Raises:
            ValueError: The corpus was prepared without --sentences.
        """
        self._refuse_documents()
        sequences = self._sequences(index, first, end)
        return [text for ids in sequences if (text := ids[ids != Tokenizer.eos_id]).size]

    def sentence_lengths(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the lengths of all sentences, found without reading them.

        Returns:
            Tokens of each sentence, without the final `</s>` of a document, int32 [sentences]; the
            first sentence of each document, and the number of sentences, int64 [documents + 1]. An
            empty document has one sentence of length 0.

        Raises:
            ValueError: The corpus was prepared without --sentences.
        """
        self._refuse_documents()
        prefixes = [self.folder / files.stem for files in self._shards]
        lengths = np.concatenate([read_lengths(prefix) for prefix in prefixes])
        counts = [np.diff(read_document_bounds(prefix)) for prefix in prefixes]
        bounds = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        lengths[bounds[1:] - 1] -= 1
        return lengths, bounds

    def _refuse_documents(self) -> None:
        if self.manifest.settings.unit != "sentence":
            raise ValueError(
                f"{self.folder}: its sequences are documents; accepted: a corpus prepared with "
                "--sentences"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what can be read from the disk again."""
        left_out = ("lengths", "subsets")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        return state | {"_open": {}}

    def _sequences(
        self, index: int, first: int = 0, end: int | None = None
    ) -> list[npt.NDArray[np.integer[Any]]]:
        """Return views of the sequences [first, end) of a document; its last includes `</s>`."""
        if not 0 <= index < len(self):
            raise IndexError(
                f"document {index} of {self.folder} {self.split}, which has {len(self)}"
            )
        shard = bisect.bisect_right(self._firsts, index) - 1
        number = int(index) - self._firsts[shard]
        dataset = self._dataset(shard)
        if self.manifest.settings.unit == "document":
            return [dataset[number]]
        chosen = range(*dataset.document_indices[number : number + 2].tolist())[first:end]
        return list(dataset[chosen.start : chosen.stop]) if chosen else []

    def _dataset(self, shard: int) -> "IndexedDataset":
        if shard not in self._open:
            self._open[shard] = open_indexed(self.folder / self._shards[shard].stem)
        return self._open[shard]

    def _shard_lengths(self, files: ShardFiles) -> npt.NDArray[np.int32]:
        prefix = self.folder / files.stem
        lengths = read_lengths(prefix)
        if self.manifest.settings.unit == "sentence":
            # reduceat needs a sequence per document; each has one, because of its `</s>`.
            lengths = np.add.reduceat(lengths, read_document_bounds(prefix)[:-1], dtype=np.int32)
        self._check_count(files, ".idx", len(lengths))
        return lengths

    def _shard_subsets(self, files: ShardFiles) -> npt.NDArray[np.uint8]:
        side_file = self.folder / f"{files.stem}.subsets"
        if not side_file.is_file():
            raise ValueError(f"{side_file}: no such file")
        numbers = np.fromfile(side_file, dtype=np.uint8)
        self._check_count(files, ".subsets", len(numbers))
        table = [self.manifest.subsets.index(name) for name in files.subsets]
        return np.array(table, dtype=np.uint8)[numbers]

    def _check_count(self, files: ShardFiles, suffix: str, count: int) -> None:
        if count != files.documents:
            raise ValueError(
                f"{self.folder / files.stem}{suffix}: {count} documents, "
                f"but the manifest has {files.documents}"
            )
