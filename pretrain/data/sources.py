"""Sources: how one split of a corpus is cut into blocks.

A source has a length and gives a block by its index; order, lineage and audit know it by these two
alone. Special tokens (`<s>`, `</s>`) are the source's to add. A new way to cut is a class and a
line in SOURCES.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
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


class _Blocks(ABC):
    """Blocks of documents. Longer documents are dropped, unless a subclass cuts them."""

    name: ClassVar[str]
    documents_apart: ClassVar[bool]
    """Each document has an `<s>` of its own, and does not see the others of its block."""

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        """Choose a split and the length of its blocks. It is cut when a block is first asked for.

        Raises:
            ValueError: no document is short enough for a block.
        """
        self.corpus = corpus
        self.sequence_length = sequence_length
        if not self._tokens:
            raise ValueError(
                f"{corpus.folder}: no document of split {corpus.split!r} fits into "
                f"data.sequence_length {sequence_length}; the shortest has "
                f"{int(corpus.lengths.min())} tokens and needs one more for <s>; accepted: longer "
                "blocks, or data.packing=chunked"
            )

    @cached_property
    def _tables(self) -> Tables:
        """Where documents stand in blocks: found from lengths alone, or as it was found before.

        The tables are kept in the corpus's folder, so that the ranks of a machine share their
        memory and a restart takes no time.
        """
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
        """Tables to keep; `ranges`, if any, has a row per block, its first document and the end."""

    @abstractmethod
    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The documents of a block, in its order."""

    def offsets(self, index: int) -> Ids:
        """The first token that a block has of each of its documents."""
        return np.zeros(len(self.documents(index)), dtype=np.int64)

    def _sizes(self, index: int) -> Ids:
        """Ids of each document of a block, with the `<s>` in front of it."""
        left = self.corpus.lengths[self.documents(index)] - self.offsets(index)
        sizes: Ids = np.minimum(left, self.sequence_length - 1)
        sizes[: None if self.documents_apart else 1] += 1
        return sizes

    def __reduce__(self) -> tuple[type[_Blocks], tuple[Corpus, int]]:
        """Pickle without the tables."""
        return type(self), (self.corpus, self.sequence_length)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._tables["ranges"])

    def __getitem__(self, index: int) -> Block:
        """One block, without subsets."""
        parts: list[npt.ArrayLike] = []
        sizes = self._sizes(index)
        documents, offsets = self.documents(index).tolist(), self.offsets(index).tolist()
        for number, (document, first) in enumerate(zip(documents, offsets, strict=True)):
            starts = number == 0 or self.documents_apart
            if starts:
                parts.append([Tokenizer.bos_id])
            end = first + int(sizes[number]) - starts
            parts.append(self.corpus.document(document, first, end))
        numbers = np.repeat(np.arange(1, len(sizes) + 1), sizes) if self.documents_apart else None
        return Block(np.concatenate(parts).astype(np.int64), numbers)

    def size(self, index: int) -> int:
        """Number of ids of a block, found without reading them."""
        return int(self._sizes(index).sum())

    def subsets(self, index: int) -> Ids:
        """[n]: the subset of each id's document, an index into the manifest's names."""
        subsets: Ids = self.corpus.subsets[self.documents(index)].astype(np.int64)
        return np.repeat(subsets, self._sizes(index))

    @cached_property
    def _tokens(self) -> int:
        """Tokens of the split that the blocks hold."""
        lengths = self.corpus.lengths
        return int(lengths[lengths < self.sequence_length].sum())

    @property
    def _starts(self) -> int:
        """Number of `<s>` in all blocks."""
        return len(self)

    @property
    def share_of_tokens(self) -> float:
        """Share of the split's tokens that the blocks hold."""
        return self._tokens / int(self.corpus.lengths.sum())

    @property
    def fill(self) -> float:
        """Share of the blocks' capacity that holds tokens."""
        return (self._tokens + self._starts) / (len(self) * self.sequence_length)


class CompleteBlocks(_Blocks):
    """As many documents as fit, in the corpus's order: fairseq's break mode "complete"."""

    name, documents_apart = "complete", False

    def _cut(self) -> Tables:
        return {"ranges": complete(self.corpus.lengths, self.sequence_length)}

    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The documents of a block, in its order."""
        return np.arange(*self._tables["ranges"][index])


class BestFitBlocks(_Blocks):
    """Documents from anywhere, so that blocks are as full as possible (`data_prep.blocks`)."""

    name, documents_apart = "best-fit", True

    def _cut(self) -> Tables:
        return self._pack(self.corpus.lengths)

    def _pack(self, lengths: npt.NDArray[np.integer[Any]], *, exact: bool = False) -> Tables:
        documents, ends = best_fit(lengths, self.sequence_length, exact=exact)
        starts = np.concatenate([[0], ends])[:-1]
        return {"ranges": np.column_stack([starts, ends]), "documents": documents}

    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The documents of a block, in its order."""
        first, end = self._tables["ranges"][index]
        return self._tables["documents"][first:end]

    @property
    def _starts(self) -> int:
        return len(self._tables["documents"])


class ChunkedBlocks(BestFitBlocks):
    """Blocks that hold every token: documents that are longer than a block are cut into chunks.

    Each chunk has its own `<s>` and does not see other chunks. All chunks of a document but the
    last fill a block each. The last chunks, and the documents that are short enough, are packed
    best-fit (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). These blocks come
    first; the full chunks follow in the corpus's order.
    """

    name = "chunked"

    def _cut(self) -> Tables:
        lengths, room = self.corpus.lengths, self.sequence_length - 1
        long = np.flatnonzero(lengths > room)
        full_chunks = (lengths[long].astype(np.int64) - 1) // room
        return {
            **self._pack((lengths - 1) % room + 1, exact=True),
            "long": long.astype(np.uint32),
            "first_chunks": np.concatenate([[0], np.cumsum(full_chunks)]),
        }

    def __len__(self) -> int:
        """Number of blocks."""
        return super().__len__() + int(self._tables["first_chunks"][-1])

    def _full_chunk(self, index: int) -> tuple[int, int] | None:
        """The document of a block that is one full chunk, and the chunk's number in it."""
        first_chunks, chunk = self._tables["first_chunks"], index - super().__len__()
        if chunk < 0:
            return None
        if chunk >= first_chunks[-1]:
            raise IndexError(f"block {index} of {len(self)}")
        place = int(np.searchsorted(first_chunks, chunk, side="right")) - 1
        return int(self._tables["long"][place]), chunk - int(first_chunks[place])

    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The documents of a block, in its order."""
        chunk = self._full_chunk(index)
        return np.array(chunk[:1]) if chunk else super().documents(index)

    def offsets(self, index: int) -> Ids:
        """The first token that a block has of each of its documents."""
        room, chunk = self.sequence_length - 1, self._full_chunk(index)
        if chunk:
            return np.array([chunk[1] * room])
        last_tokens: Ids = self.corpus.lengths[self.documents(index)].astype(np.int64) - 1
        return last_tokens // room * room

    @cached_property
    def _tokens(self) -> int:
        return int(self.corpus.lengths.sum())

    @property
    def _starts(self) -> int:
        return len(self.corpus.lengths) + int(self._tables["first_chunks"][-1])


class ContiguousBlocks(_Blocks):
    """The split as one text, cut every `sequence_length` - 1 tokens, with an `<s>` in front.

    For causal models, as in Press et al. 2022 (fairseq's break mode "none", which has the token
    before the block in the place of `<s>`). `</s>` stands between documents, which see each other.
    """

    name, documents_apart = "contiguous", False

    def _cut(self) -> Tables:
        return {"ends": np.cumsum(self.corpus.lengths, dtype=np.int64)}

    def __len__(self) -> int:
        """Number of blocks."""
        return -(-self._tokens // (self.sequence_length - 1))

    def _span(self, index: int) -> tuple[int, int]:
        """The first token of a block in the split, and the end."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        first = index * (self.sequence_length - 1)
        return first, min(first + self.sequence_length - 1, self._tokens)

    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The documents of a block, in its order."""
        first, end = self._span(index)
        ends = self._tables["ends"]
        return np.arange(np.searchsorted(ends, first, "right"), np.searchsorted(ends, end) + 1)

    def offsets(self, index: int) -> Ids:
        """The first token that a block has of each of its documents."""
        documents = self.documents(index)
        begin = self._tables["ends"][documents[0]] - self.corpus.lengths[documents[0]]
        offsets = np.zeros(len(documents), dtype=np.int64)
        offsets[0] = self._span(index)[0] - begin
        return offsets

    def _sizes(self, index: int) -> Ids:
        first, end = self._span(index)
        documents = self.documents(index)
        sizes: Ids = self.corpus.lengths[documents] - self.offsets(index)
        sizes[-1] -= self._tables["ends"][documents[-1]] - end
        sizes[0] += 1
        return sizes

    @cached_property
    def _tokens(self) -> int:
        return int(self.corpus.lengths.sum())


SOURCES: Mapping[str, type[_Blocks]] = MappingProxyType(
    {
        "chunked": ChunkedBlocks,
        "best-fit": BestFitBlocks,
        "complete": CompleteBlocks,
        "contiguous": ContiguousBlocks,
    }
)
"""The values of `data.packing` in a recipe."""
