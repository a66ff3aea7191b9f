"""What the blocks of every packing have in common: how a split was cut is kept on disk."""

from abc import ABC, abstractmethod
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from data_prep import cache
from data_prep.cache import Table, Tables
from data_prep.corpus import Corpus
from data_prep.tokenizer import Tokenizer
from pretrain.objectives.base import Block, Ids


class Blocks(ABC):
    """Blocks of documents. Longer documents are dropped, unless a subclass cuts them."""

    name: ClassVar[str]
    algorithm: ClassVar[int] = 1
    """Increased with every change of what `_cut` returns: a run cannot go on with other blocks."""
    pairs: ClassVar[bool] = False
    dropped: ClassVar[str] = "longer documents"
    documents_apart: ClassVar[bool]
    """Each document has an `<s>` of its own, and does not see the others of its block."""

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        """Choose a split and the length of its blocks, and cut it, unless that was done before.

        Raises:
            ValueError: no document is short enough for a block.
        """
        self.corpus = corpus
        self.sequence_length = sequence_length
        if not len(self):
            raise ValueError(f"{corpus.folder}: no document of split {corpus.split!r} {self._need}")

    @property
    def _need(self) -> str:
        """What no document does where there are no blocks."""
        return (
            f"fits into data.sequence_length {self.sequence_length}; the shortest has "
            f"{int(self.corpus.lengths.min())} tokens and needs one more for <s>; use longer "
            "blocks, or the packing chunked or contiguous"
        )

    @cached_property
    def _tables(self) -> Tables:
        """Where documents stand in blocks: found from lengths alone, or as it was found before.

        Raises:
            ValueError: as `data_prep.cache.tables`.
        """
        corpus = self.corpus
        name = f"{corpus.split}-{self.name}-{self.algorithm}-{self.sequence_length}"
        cut = partial(self._cut, corpus.lengths)
        return cache.tables(corpus.folder, corpus.manifest.digest(), name, cut)

    def check_tables(self) -> None:
        """Count the documents' tokens and cut the split again.

        Raises:
            ValueError: the kept tables are others.
        """
        tables = {"lengths": self.corpus.lengths, **self._tables}
        counted = self.corpus.count_lengths()
        for name, array in (counted | self._cut(counted["lengths"])).items():
            kept = tables.get(name)
            if kept is None or not np.array_equal(kept, array):
                raise ValueError(
                    f"{self.corpus.folder}: the kept table {name} of the blocks of split "
                    f"{self.corpus.split!r} (data.packing={self.name}, data.sequence_length "
                    f"{self.sequence_length}) is not what the corpus gives"
                )

    @abstractmethod
    def _cut(self, lengths: Table) -> Tables:
        """Tables to keep; `ranges`, if any, has a row per block, its first document and the end.

        A function of the documents' lengths, unless a subclass has others.
        """

    @abstractmethod
    def parts(self, index: int) -> tuple[Table, Table]:
        """The documents of a block, in its order, and the first token that it has of each."""

    def _sizes(self, index: int) -> Ids:
        """Ids of each document of a block, with the `<s>` in front of it."""
        documents, firsts = self.parts(index)
        ends = (self.corpus.lengths[documents] - firsts).cumsum()
        sizes: Ids = np.diff(ends.clip(max=self.sequence_length - 1), prepend=0)
        sizes[: None if self.documents_apart else 1] += 1
        return sizes

    def __reduce__(self) -> tuple[type["Blocks"], tuple[Corpus, int]]:
        """Pickle without the tables."""
        return type(self), (self.corpus, self.sequence_length)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._tables["ranges"])

    def __getitem__(self, index: int) -> Block:
        """One block, without subsets."""
        parts: list[npt.ArrayLike] = []
        sizes, of_block = self._sizes(index), (part.tolist() for part in self.parts(index))
        for number, (document, first) in enumerate(zip(*of_block, strict=True)):
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

    def tokens(self, index: int) -> int:
        """Number of ids of a block but `<s>`, found without reading them."""
        sizes = self._sizes(index)
        starts = len(sizes) if self.documents_apart else int(not self.pairs)
        return int(sizes.sum()) - starts

    def subsets(self, index: int) -> Ids:
        """[n]: the subset of each id's document, an index into the manifest's names."""
        documents, _ = self.parts(index)
        return np.repeat(self.corpus.subsets[documents].astype(np.int64), self._sizes(index))

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
        return self._tokens / self.corpus.tokens

    @property
    def fill(self) -> float:
        """Share of the blocks' capacity that holds tokens."""
        return (self._tokens + self._starts) / (len(self) * self.sequence_length)
