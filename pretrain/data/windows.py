"""Windows of documents: the same targets, whatever the length of a window.

The targets of a document are drawn once, for all its tokens, keyed by the document. The document
is then cut into windows of L tokens: an `<s>` and the next L - 1 tokens of the document. `<s>` is
never a target. `</s>` is the last token of a document, so only the last window has it. Thus every
token of a document is in one window of each length, and is a target at every length or at none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from data_prep.corpus import Corpus
from data_prep.tokenizer import Tokenizer
from pretrain.data.batches import validation_key
from pretrain.loop import MicroBatch
from pretrain.objectives.base import Block, DocumentObjective, Ids


@dataclasses.dataclass(frozen=True, eq=False)
class _Window:
    """Part of a document with an `<s>` in front."""

    ids: Ids
    """[n]"""
    inputs: Ids
    """[n]: what the model reads."""
    positions: Ids
    """[m]: the tokens to predict."""
    subset: int


def number_of_windows(corpus: Corpus, documents: Sequence[int], length: int) -> int:
    """How many windows some documents are cut into."""
    return int((-(-corpus.lengths[documents] // (length - 1))).sum())


def window_batches(
    corpus: Corpus,
    objective: DocumentObjective,
    documents: Sequence[int],
    length: int,
    rows: int,
) -> Iterator[MicroBatch]:
    """Windows of documents, as micro-batches.

    Short windows share a row, where they do not see each other.

    Args:
        corpus: the split.
        objective: for validation.
        documents: to read, at least one.
        length: L, most tokens of a window and of a row, at least 2.
        rows: most rows of a micro-batch.
    """
    batch: list[list[_Window]] = []
    room: list[int] = []
    for window in _windows(corpus, objective, documents, length):
        size = len(window.ids)
        row = next((row for row, left in enumerate(room) if size <= left), len(room))
        if row == rows:
            yield _micro_batch(objective, batch, length)
            batch, room, row = [], [], 0
        if row == len(room):
            batch.append([])
            room.append(length)
        batch[row].append(window)
        room[row] -= size
    yield _micro_batch(objective, batch, length)


def _windows(
    corpus: Corpus, objective: DocumentObjective, documents: Sequence[int], length: int
) -> Iterator[_Window]:
    start = np.array([Tokenizer.bos_id])
    for document in documents:
        ids = corpus.document(document).astype(np.int64)
        inputs, positions = objective.mask(ids, validation_key(document))
        subset = int(corpus.subsets[document])
        for first in range(0, len(ids), length - 1):
            end = first + length - 1
            low, high = np.searchsorted(positions, [first, end])
            yield _Window(
                np.concatenate([start, ids[first:end]]),
                np.concatenate([start, inputs[first:end]]),
                positions[low:high] - first + 1,
                subset,
            )


def _micro_batch(
    objective: DocumentObjective, rows: Sequence[Sequence[_Window]], length: int
) -> MicroBatch:
    blocks, masked = [], []
    for windows in rows:
        sizes = [len(window.ids) for window in windows]
        starts = np.cumsum([0, *sizes])
        blocks.append(
            Block(
                np.concatenate([window.ids for window in windows]),
                np.repeat(np.arange(1, len(sizes) + 1), sizes) if len(sizes) > 1 else None,
                np.repeat([window.subset for window in windows], sizes),
            )
        )
        places = [window.positions + first for window, first in zip(windows, starts, strict=False)]
        masked.append((np.concatenate([w.inputs for w in windows]), np.concatenate(places)))
    arrays = objective.arrange(blocks, masked, length)
    tokens = sum(len(block.ids) for block in blocks)
    return MicroBatch(0, arrays, tokens, objective.targets(arrays))
