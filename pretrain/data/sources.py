"""Sources: how one split of a corpus is cut into blocks.

A source has a length and gives a block by its index; order, lineage and audit know it by these two
alone. Special tokens (`<s>`, `</s>`) are the source's to add, but for blocks of sentences. A new
way to cut is a class and a line in SOURCES. Blocks of sentences are in sentence_pairs.py, what all
classes have in common is in blocks.py.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_prep.blocks import best_fit, complete
from data_prep.cache import Table, Tables
from data_prep.corpus import Corpus
from pretrain.data.blocks import Blocks
from pretrain.data.sentence_pairs import SentencePairs
from pretrain.objectives.base import Block, Ids

if TYPE_CHECKING:
    from pretrain.config.block_sources import BlockSource


@dataclasses.dataclass(frozen=True)
class ConcatenatedBlocks:
    """The blocks of several sources, numbered through as `order.Order` numbers them."""

    sources: tuple[Blocks, ...]
    """At least one."""
    sequence_length: int
    """Most ids that a model reads of the blocks that are asked for."""

    @cached_property
    def _firsts(self) -> list[int]:
        return [0, *itertools.accumulate(map(len, self.sources))]

    def __getitem__(self, index: int) -> Block:
        """One block, without subsets."""
        number = bisect.bisect_right(self._firsts, index) - 1
        return self.sources[number][index - self._firsts[number]]

    @property
    def share_of_tokens(self) -> float:
        """Share of the splits' tokens that the blocks hold."""
        tokens = [source.corpus.tokens for source in self.sources]
        pairs = zip(self.sources, tokens, strict=True)
        return sum(round(source.share_of_tokens * n) for source, n in pairs) / sum(tokens)


class CompleteBlocks(Blocks):
    """As many documents as fit, in the corpus's order: fairseq's break mode "complete"."""

    name, documents_apart = "complete", False

    def _cut(self, lengths: Table) -> Tables:
        return {"ranges": complete(lengths, self.sequence_length)}

    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The documents of a block, in its order."""
        return np.arange(*self._tables["ranges"][index])


class BestFitBlocks(Blocks):
    """Documents from anywhere, so that blocks are as full as possible (`data_prep.blocks`)."""

    name, documents_apart = "best-fit", True

    def _cut(self, lengths: Table) -> Tables:
        return self._pack(lengths)

    def _pack(self, lengths: Table, *, exact: bool = False) -> Tables:
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

    def _cut(self, lengths: Table) -> Tables:
        room = self.sequence_length - 1
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
        return self.corpus.tokens

    @property
    def _starts(self) -> int:
        return len(self.corpus) + int(self._tables["first_chunks"][-1])


class ContiguousBlocks(Blocks):
    """The split as one text, cut every `sequence_length` - 1 tokens, with an `<s>` in front.

    For causal models, as in Press et al. 2022 (fairseq's break mode "none", which has the token
    before the block in the place of `<s>`). `</s>` stands between documents, which see each other.
    """

    name, documents_apart = "contiguous", False

    def _cut(self, lengths: Table) -> Tables:
        return {"ends": np.cumsum(lengths, dtype=np.int64)}

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
        return self.corpus.tokens


class OneDocumentBlocks(Blocks):
    """`<s>` and the beginning of one document, as many tokens as fit; the rest is dropped."""

    name, documents_apart = "one-document", False
    dropped = "the ends of longer documents"

    def _cut(self, lengths: Table) -> Tables:
        return {}

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.corpus)

    def documents(self, index: int) -> npt.NDArray[np.integer[Any]]:
        """The document of a block."""
        return np.array([index])

    @cached_property
    def _tokens(self) -> int:
        return int(np.minimum(self.corpus.lengths, self.sequence_length - 1).sum(dtype=np.int64))


SOURCES: Mapping[str, type[Blocks]] = {
    kind.name: kind
    for kind in (
        ChunkedBlocks,
        BestFitBlocks,
        CompleteBlocks,
        ContiguousBlocks,
        OneDocumentBlocks,
        SentencePairs,
    )
}
"""The values of `data.packing` in a recipe."""


def algorithms(sources: Iterable[BlockSource]) -> list[str]:
    """Name the algorithm that cuts each source, as the ledger does: its packing and version."""
    return [f"{source.packing}-{SOURCES[source.packing].algorithm}" for source in sources]


def open_source(source: BlockSource, split: str) -> Blocks:
    """Return the blocks of one split of a corpus, cut in one way.

    Raises:
        ValueError: no document fits into a block, or the packing needs another kind of corpus.
    """
    corpus = Corpus(Path(source.path), split)
    return SOURCES[source.packing](corpus, source.sequence_length)
