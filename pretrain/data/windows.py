"""Windows of texts: the same targets, whatever the length of a window.

The targets of a document are drawn once, for all its tokens, keyed by the document. A text is a
document, or the concatenation of all documents. It is cut into windows of L ids: an `<s>`, which is
never a target, and L - 1 tokens. Each window begins `stride` tokens after the one before. The first
scores all its targets, each later one only those that no window scored before. Thus every token of
a text is a target once at each length, or at none; where it is not in the first window, at least
L - 1 - stride tokens of its window stand before it. With a stride of L - 1 or more windows do not
overlap. (Press et al. 2022, appendix B, whose windows have no `<s>`.)
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from data_prep.corpus import Corpus
from data_prep.tokenizer import Tokenizer
from pretrain.data.batches import validation_key
from pretrain.loop.protocols import MicroBatch
from pretrain.objectives.base import Block, Ids
from pretrain.objectives.tokens import IGNORED, DocumentObjective


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of one length over documents of a split."""

    corpus: Corpus
    documents: Sequence[int]
    """To read, at least one."""
    length: int
    """L, most ids of a window, at least 2."""
    stride: int
    """From 1 to L."""
    one_text: bool = False
    """Read the documents as one text, so that windows cross their boundaries."""

    @cached_property
    def row(self) -> int:
        """Ids of a row of a micro-batch: L, or those of the longest text, if it is shorter."""
        return min(self.length, int(self._texts.max()) + 1)

    def __len__(self) -> int:
        """Number of windows."""
        return int((1 + self._later).sum())

    @property
    def ids(self) -> int:
        """Ids of all windows."""
        return int(self._texts.sum() + self._later.sum() * (self._room - self._step)) + len(self)

    def batches(self, objective: DocumentObjective, rows: int) -> Iterator[MicroBatch]:
        """Micro-batches of windows. At most a window and a document are in memory besides.

        Short windows share a row, where they do not see each other.

        Args:
            objective: for validation.
            rows: most rows of a micro-batch.
        """
        batch: list[list[Ids]] = []
        room: list[int] = []
        for window in self._windows(objective):
            size = window.shape[1]
            row = next((row for row, left in enumerate(room) if size <= left), len(room))
            if row == rows:
                yield self._micro_batch(objective, batch)
                batch, room, row = [], [], 0
            if row == len(room):
                batch.append([])
                room.append(self.row)
            batch[row].append(window)
            room[row] -= size
        yield self._micro_batch(objective, batch)

    @cached_property
    def _texts(self) -> Ids:
        """Tokens of each text."""
        lengths: Ids = self.corpus.lengths[self.documents].astype(np.int64)
        return lengths.sum(keepdims=True) if self.one_text else lengths

    @property
    def _room(self) -> int:
        """Most tokens of a window."""
        return self.row - 1

    @property
    def _step(self) -> int:
        """Tokens from the begin of one window to that of the next."""
        return min(self.stride, self._room)

    @property
    def _later(self) -> Ids:
        """Windows of each text but its first."""
        return -(-(self._texts - self._room).clip(0) // self._step)

    def _windows(self, objective: DocumentObjective) -> Iterator[Ids]:
        """Windows [4, n]: of each token its id, what the model reads, subset, whether a target."""
        documents = (self._tokens(objective, document) for document in self.documents)
        for text in [documents] if self.one_text else ([document] for document in documents):
            yield from self._cut(text)

    def _tokens(self, objective: DocumentObjective, document: int) -> Ids:
        """A document, laid out like a window."""
        ids = self.corpus.document(document).astype(np.int64)
        inputs, positions = objective.mask(ids, validation_key(document))
        is_target = np.zeros_like(ids)
        is_target[positions] = 1
        subset = int(self.corpus.subsets[document])
        return np.stack([ids, inputs, np.full_like(ids, subset), is_target])

    def _cut(self, text: Iterable[Ids]) -> Iterator[Ids]:
        """The windows of one text, which comes in parts."""
        tokens, scored = np.empty((4, 0), dtype=np.int64), 0
        for part in text:
            tokens = np.concatenate([tokens, part], axis=1)
            while tokens.shape[1] >= self._room:
                yield _window(tokens[:, : self._room], scored)
                tokens, scored = tokens[:, self._step :], self._room - self._step
        if tokens.shape[1] > scored:
            yield _window(tokens, scored)

    def _micro_batch(
        self, objective: DocumentObjective, rows: Sequence[Sequence[Ids]]
    ) -> MicroBatch:
        blocks, masked = [], []
        for windows in rows:
            ids, inputs, subsets, is_target = np.concatenate(windows, axis=1)
            sizes = [window.shape[1] for window in windows]
            numbers = np.repeat(np.arange(1, len(sizes) + 1), sizes) if len(sizes) > 1 else None
            blocks.append(Block(ids, numbers, subsets))
            masked.append((inputs, np.flatnonzero(is_target)))
        arrays = objective.arrange(blocks, masked, self.row)
        if self._step < self._room:
            # The head is not computed for the targets that other windows score.
            used = arrays["labels"] != IGNORED
            for name in ("target_positions", "labels", "subsets"):
                arrays[name] = arrays[name][used]
        tokens = sum(len(block.ids) for block in blocks)
        return MicroBatch(0, arrays, tokens, objective.targets(arrays))


def _window(tokens: Ids, scored: int) -> Ids:
    """The tokens after an `<s>`, without the targets among the first `scored`, scored before."""
    window = np.pad(tokens, ((0, 0), (1, 0)))
    window[:2, 0] = Tokenizer.bos_id
    window[3, : 1 + scored] = 0
    return window
