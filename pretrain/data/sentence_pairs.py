"""Blocks of consecutive sentences of one document, for objectives of pairs of segments."""

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.cache import Table, Tables
from data_prep.corpus import Corpus
from pretrain.data.blocks import Blocks
from pretrain.objectives.base import PAIR_SPECIAL_TOKENS, Block, Ids

_SHORT_SHARE = 0.1
"""Share of the blocks that are cut to a random length (Lan et al. 2020, section 4.1)."""
_SEED = 0


class SentencePairs(Blocks):
    """As many consecutive sentences of one document as fit, at least two, and no special tokens.

    A tenth of the blocks is shorter: the room for their text is drawn from [2, room]. The last
    sentence of a document is not left alone: it joins the block before it, or takes a sentence from
    it. Documents of one sentence are dropped. Where two or three sentences exceed the room, a block
    has more ids than it, and the objective cuts them.

    A sentence that does not fit begins the next block, so that first sentences are long. Lengths
    would give the order of segments away, so every second document is cut from its end.
    """

    name, documents_apart, pairs = "sentence-pairs", False, True
    dropped = "documents of one sentence, and of sentences longer than a block"

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        """Choose a split and the length of its blocks, and cut it, unless that was done before.

        Raises:
            ValueError: the corpus was prepared without --sentences, has no document of two
                sentences, or the blocks have no room for two tokens.
        """
        if sequence_length < PAIR_SPECIAL_TOKENS + 2:
            raise ValueError(
                f"data.sequence_length {sequence_length}: accepted with data.packing={self.name}: "
                f"{PAIR_SPECIAL_TOKENS + 2} or more, {PAIR_SPECIAL_TOKENS} of them for "
                "<s> a </s> b </s>"
            )
        super().__init__(corpus, sequence_length)

    @property
    def _need(self) -> str:
        return f"has two sentences, as data.packing={self.name} needs"

    @property
    def _room(self) -> int:
        """Most tokens of text that a model reads of a block."""
        return self.sequence_length - PAIR_SPECIAL_TOKENS

    def _cut(self, lengths: Table) -> Tables:
        lengths, bounds = self.corpus.sentence_lengths()
        ranges, documents = sentence_runs(lengths, bounds, self._room)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return {
            "ranges": (ranges - bounds[documents, None]).astype(np.uint32),
            "documents": documents.astype(np.uint32),
            "sizes": np.diff(ends[ranges]).ravel(),
        }

    def __getitem__(self, index: int) -> Block:
        """One block, without subsets."""
        (document,), (first, end) = self.parts(index)[0], self._tables["ranges"][index].tolist()
        sentences = self.corpus.sentences(document, first, end)
        return Block(
            np.concatenate(sentences).astype(np.int64),
            sentences=np.array([len(sentence) for sentence in sentences]),
            sample_other_document=lambda share: self[self._other_document(index, share)],
        )

    def _other_document(self, index: int, share: float) -> int:
        """The block of another document that a number from [0, 1) chooses."""
        documents = self._tables["documents"]
        first: int = np.searchsorted(documents, documents[index]).item()
        end: int = np.searchsorted(documents, documents[index], side="right").item()
        others = len(self) - (end - first)
        if not others:
            raise ValueError(
                f"{self.corpus.folder}: all blocks of split {self.corpus.split!r} are of one "
                "document, so there is no segment of another one; use more documents, or "
                "objective.pair_task=sop"
            )
        chosen = int(share * others)
        return chosen if chosen < first else chosen + end - first

    def parts(self, index: int) -> tuple[Table, Table]:
        """The document of a block, and the first sentence that it has of it."""
        return self._tables["documents"][index : index + 1], self._tables["ranges"][index, :1]

    def _sizes(self, index: int) -> Ids:
        return self._tables["sizes"][index : index + 1].astype(np.int64)

    @cached_property
    def _read(self) -> int:
        """Tokens of text that a model reads of all blocks."""
        return int(np.minimum(self._tables["sizes"], self._room).sum())

    @cached_property
    def _tokens(self) -> int:
        """Tokens of the split that the blocks hold, with one `</s>` of each document."""
        return self._read + len(np.unique(self._tables["documents"]))

    @property
    def fill(self) -> float:
        """Share of the blocks' capacity that holds tokens."""
        return (self._read / len(self) + PAIR_SPECIAL_TOKENS) / self.sequence_length


def sentence_runs(
    lengths: npt.NDArray[np.integer[Any]], bounds: npt.NDArray[np.integer[Any]], room: int
) -> tuple[Ids, Ids]:
    """Cut documents into runs of at least two consecutive sentences; see `SentencePairs`.

    A pure function of its arguments. All documents are cut side by side, so that the time in Python
    depends on the number of runs of the longest document alone. Takes about 10 bytes a sentence.

    Args:
        lengths: tokens of each sentence, [sentences].
        bounds: the first sentence of each document, and the number of sentences, [documents + 1].
        room: most tokens of a run, unless two sentences are longer.

    Returns:
        The first sentence of each run and the one after its last, [runs, 2]; the document of each,
        [runs]. In the order of the sentences.
    """
    draw = np.random.RandomState(_SEED)
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    documents = np.flatnonzero(np.diff(bounds) > 1)
    first, last = bounds[documents], bounds[documents + 1]
    rounds = [np.empty((0, 3), dtype=np.int64)]
    while len(first):
        is_short, share = draw.random_sample((2, len(first)))
        target = np.where(is_short < _SHORT_SHARE, 2 + (share * (room - 1)).astype(int), room)
        from_end = documents % 2 == 1
        fit = np.where(
            from_end,
            last - np.searchsorted(ends, ends[last] - target),
            np.searchsorted(ends, ends[first] + target, side="right") - 1 - first,
        )
        size = np.clip(fit, 2, last - first)
        # A last sentence that would be alone takes one from a run of three or more, or joins.
        size += (size == last - first - 1) * np.where(size > 2, -1, 1)
        begin = np.where(from_end, last - size, first)
        rounds.append(np.column_stack([begin, begin + size, documents]))
        first, last = np.where(from_end, first, first + size), np.where(from_end, begin, last)
        more = first < last
        first, last, documents = first[more], last[more], documents[more]
    runs = np.concatenate(rounds)
    runs = runs[np.argsort(runs[:, 0])]
    return runs[:, :2], runs[:, 2]
