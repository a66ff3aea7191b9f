"""Sources: how one split of a corpus is cut into blocks.

A source has a length and gives a block by its index; order, lineage and audit know it by these two
alone. Special tokens (`<s>`, `</s>`) are the source's to add, but for blocks of sentences. A new
way to cut is a class and a line in SOURCES. Blocks of sentences are in sentence_pairs.py, what all
classes have in common is in blocks.py.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from data_prep.blocks import best_fit, complete
from data_prep.cache import Table, Tables
from data_prep.corpus import Corpus
from pretrain.data.blocks import Blocks
from pretrain.data.sentence_pairs import SentencePairs
from pretrain.objectives.base import Block

if TYPE_CHECKING:
    from pretrain.config.run import BlockSource


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

    def parts(self, index: int) -> tuple[Table, Table]:
        """The documents of a block, in its order, and the first token that it has of each."""
        documents = np.arange(*self._tables["ranges"][index])
        return documents, np.zeros_like(documents)


class BestFitBlocks(Blocks):
    """Documents from anywhere, so that blocks are as full as possible (`data_prep.blocks`)."""

    name, documents_apart = "best-fit", True
    _exact: ClassVar[bool] = False

    def _cut(self, lengths: Table) -> Tables:
        documents, ends = best_fit(lengths, self.sequence_length, exact=self._exact)
        starts = np.concatenate([[0], ends])[:-1]
        return {"ranges": np.column_stack([starts, ends]), "documents": documents}

    def parts(self, index: int) -> tuple[Table, Table]:
        """The documents of a block, in its order, and the first token that it has of each."""
        first, end = self._tables["ranges"][index]
        return self._tables["documents"][first:end], np.zeros(end - first, dtype=np.int64)

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

    name, _exact = "chunked", True

    def _cut(self, lengths: Table) -> Tables:
        room = self.sequence_length - 1
        long = np.flatnonzero(lengths > room)
        full_chunks = (lengths[long].astype(np.int64) - 1) // room
        return {
            **super()._cut((lengths - 1) % room + 1),
            "long": long.astype(np.uint32),
            "first_chunks": np.concatenate([[0], np.cumsum(full_chunks)]),
        }

    def __len__(self) -> int:
        """Number of blocks."""
        return super().__len__() + int(self._tables["first_chunks"][-1])

    def parts(self, index: int) -> tuple[Table, Table]:
        """The documents of a block, in its order, and the first token that it has of each."""
        first_chunks, chunk = self._tables["first_chunks"], index - super().__len__()
        room = self.sequence_length - 1
        if chunk < 0:
            documents, _ = super().parts(index)
            last_tokens = self.corpus.lengths[documents].astype(np.int64) - 1
            return documents, last_tokens // room * room
        place = [np.searchsorted(first_chunks, chunk, side="right") - 1]
        return self._tables["long"][place], (chunk - first_chunks[place]) * room

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

    def parts(self, index: int) -> tuple[Table, Table]:
        """The documents of a block, in its order, and the first token that it has of each."""
        first = index * (self.sequence_length - 1)
        if not 0 <= first < self._tokens:
            raise IndexError(f"block {index} of {len(self)}")
        end, ends = min(first + self.sequence_length - 1, self._tokens), self._tables["ends"]
        documents = np.arange(np.searchsorted(ends, first, "right"), np.searchsorted(ends, end) + 1)
        begins = ends[documents] - self.corpus.lengths[documents]
        return documents, (first - begins).clip(0)

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

    def parts(self, index: int) -> tuple[Table, Table]:
        """The document of a block, and its first token."""
        return np.array([index]), np.array([0])

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


def algorithms(sources: Iterable["BlockSource"]) -> list[str]:
    """Name the algorithm that cuts each source, as the ledger does: its packing and version."""
    return [f"{source.packing}-{SOURCES[source.packing].algorithm}" for source in sources]


def open_source(source: "BlockSource", split: str) -> Blocks:
    """Return the blocks of one split of a corpus, cut in one way.

    Raises:
        ValueError: no document fits into a block, or the packing needs another kind of corpus.
    """
    corpus = Corpus(Path(source.path), split)
    return SOURCES[source.packing](corpus, source.sequence_length)
