"""Sources: how one split of a corpus is cut into blocks.

A source has a length and gives a block by its index; order, lineage and audit know it by these two
alone. Special tokens (`<s>`, `</s>`) are the source's to add. A new way to cut is a class and a
line in SOURCES.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from data_prep.blocks import best_fit, complete
from data_prep.corpus import Corpus
from data_prep.files import new_folder
from data_prep.tokenizer import Tokenizer
from pretrain.objectives.base import Block, Ids

Tables = dict[str, npt.NDArray[np.integer[Any]]]


class Source(Protocol):
    """Blocks of one corpus split. Pickles small: another process reads the tables by itself."""

    corpus: Corpus
    sequence_length: int
    """Most ids of a block."""

    def __len__(self) -> int:
        """Number of blocks."""

    def __getitem__(self, index: int) -> Block:
        """One block, without subsets."""

    def size(self, index: int) -> int:
        """Number of ids of a block, found without reading them."""

    def subsets(self, index: int) -> Ids:
        """[n]: the subset of each id's document, an index into the manifest's names."""

    @property
    def share_of_tokens(self) -> float:
        """Share of the split's tokens that the blocks hold."""

    @property
    def fill(self) -> float:
        """Share of the blocks' capacity that holds tokens."""


class _WholeDocuments(ABC):
    """Blocks of whole documents. A document that is longer than a block is left out."""

    name: ClassVar[str]
    documents_apart: ClassVar[bool]
    """Each document has an `<s>` of its own, and does not see the others of its block."""

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        """Cut the split, from lengths alone, or read how it was cut before.

        The tables are kept in the corpus's folder, so that the ranks of a machine share their
        memory and a restart takes no time.

        Raises:
            ValueError: no document is short enough for a block.
        """
        self.corpus = corpus
        self.sequence_length = sequence_length
        self._tables = self._read_tables()
        if not len(self):
            raise ValueError(
                f"{corpus.folder}: no document of split {corpus.split!r} fits into "
                f"data.sequence_length {sequence_length}; the shortest has "
                f"{int(corpus.lengths.min())} tokens and needs one more for <s>"
            )

    def _read_tables(self) -> Tables:
        corpus, digest = self.corpus, self.corpus.manifest.digest()[:16]
        name = f"{corpus.split}-{self.name}-{self.sequence_length}-{digest}"
        folder = corpus.folder / "blocks" / name
        if folder.is_dir():
            return {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
        tables = self._cut()
        # The folder may be read-only, and another process may have been faster.
        with suppress(OSError, ValueError), new_folder(folder) as partial:
            for table, array in tables.items():
                np.save(partial / f"{table}.npy", array)
        return tables

    @abstractmethod
    def _cut(self) -> Tables:
        """Tables to keep; `ranges` has a row per block, its first document and the end."""

    @abstractmethod
    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The documents of a block, in its order."""

    def _sizes(self, index: int) -> Ids:
        """Ids of each document of a block, with the `<s>` in front of it."""
        sizes: Ids = self.corpus.lengths[self.documents(index)].astype(np.int64)
        sizes[: None if self.documents_apart else 1] += 1
        return sizes

    def __reduce__(self) -> tuple[type[_WholeDocuments], tuple[Corpus, int]]:
        """Pickle without the tables."""
        return type(self), (self.corpus, self.sequence_length)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._tables["ranges"])

    def __getitem__(self, index: int) -> Block:
        """One block, without subsets."""
        parts: list[npt.ArrayLike] = []
        for number, document in enumerate(self.documents(index).tolist()):
            if number == 0 or self.documents_apart:
                parts.append([Tokenizer.bos_id])
            parts.append(self.corpus.document(document))
        sizes = self._sizes(index)
        numbers = np.repeat(np.arange(1, len(sizes) + 1), sizes) if self.documents_apart else None
        return Block(np.concatenate(parts).astype(np.int64), numbers)

    def size(self, index: int) -> int:
        """Number of ids of a block, found without reading them."""
        return int(self._sizes(index).sum())

    def subsets(self, index: int) -> Ids:
        """[n]: the subset of each id's document, an index into the manifest's names."""
        subsets: Ids = self.corpus.subsets[self.documents(index)].astype(np.int64)
        return np.repeat(subsets, self._sizes(index))

    @property
    def _tokens(self) -> int:
        lengths = self.corpus.lengths
        return int(lengths[lengths < self.sequence_length].sum())

    @property
    def share_of_tokens(self) -> float:
        """Share of the split's tokens that the blocks hold."""
        return self._tokens / int(self.corpus.lengths.sum())

    @property
    def fill(self) -> float:
        """Share of the blocks' capacity that holds tokens."""
        ranges = self._tables["ranges"]
        starts = int((ranges[:, 1] - ranges[:, 0]).sum()) if self.documents_apart else len(self)
        return (self._tokens + starts) / (len(self) * self.sequence_length)


class CompleteBlocks(_WholeDocuments):
    """As many documents as fit, in the corpus's order: fairseq's break mode "complete"."""

    name, documents_apart = "complete", False

    def _cut(self) -> Tables:
        return {"ranges": complete(self.corpus.lengths, self.sequence_length)}

    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The documents of a block, in its order."""
        return np.arange(*self._tables["ranges"][index])


class BestFitBlocks(_WholeDocuments):
    """Documents from anywhere, so that blocks are as full as possible (`data_prep.blocks`)."""

    name, documents_apart = "best-fit", True

    def _cut(self) -> Tables:
        documents, ends = best_fit(self.corpus.lengths, self.sequence_length)
        starts = np.concatenate([[0], ends])[:-1]
        return {"ranges": np.column_stack([starts, ends]), "documents": documents}

    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The documents of a block, in its order."""
        first, end = self._tables["ranges"][index]
        return self._tables["documents"][first:end]


SOURCES: Mapping[str, Callable[[Corpus, int], Source]] = MappingProxyType(
    {"complete": CompleteBlocks, "best-fit": BestFitBlocks}
)
"""The values of `data.packing` in a recipe."""
