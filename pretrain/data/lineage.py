"""The order of one corpus's blocks: a seeded permutation that needs no memory, and its history.

Positions in the order count the blocks of all epochs. Within an epoch the order is a pseudo-random
permutation, computed per position, so that 200 million blocks cost nothing to shuffle or to seek
in. A rollback to a position keeps the order before it, permutes the other blocks of the epoch anew,
and may declare some of them skipped. Whatever the history, every block is used exactly once per
epoch, except the skipped ones.

Imports numpy only. Read `Lineage`, then `_Layer`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cached_property, lru_cache

import numpy as np

from pretrain.data.permutation import Indices, permute


def digest(blocks: Indices, epochs: Indices) -> str:
    """Hash which blocks a batch reads, as metrics.jsonl has it under `blocks`.

    BLAKE2b with a digest of 8 bytes, as 16 hexadecimal digits, of the blocks' names one after the
    other in the order in which they are read. A name is 16 bytes: the epoch of the block's corpus
    and the number of the block, each as a signed 64-bit integer with the lowest byte first. Epochs
    count from 0. Blocks are numbered through: those of the first corpus from 0 on, then those of
    the next; a segment's record in the ledger lists the corpora with their numbers of blocks.

    Args:
        blocks: their numbers, [n].
        epochs: of each, [n].
    """
    names = np.column_stack([epochs, blocks]).astype("<i8")
    return hashlib.blake2b(names.tobytes(), digest_size=8).hexdigest()


def _no_names() -> Indices:
    return np.empty((0, 2), dtype=np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Reordering:
    """From `first_position` on, blocks are ordered by `seed`, and `skipped` is not read."""

    first_position: int
    seed: int
    skipped: Indices = dataclasses.field(default_factory=_no_names)
    """Names of blocks, (epoch, block) [K, 2], sorted. Positions would not outlive a rollback."""

    @cached_property
    def identity(self) -> tuple[int, int, int, str]:
        """First position, seed, number of skipped blocks, hash of their names: for a manifest."""
        epochs, blocks = self.skipped.T
        return self.first_position, self.seed, len(self.skipped), digest(blocks, epochs)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One reordering of the rest of an epoch: maps its positions to those of the layer below.

    Positions below `cut` stay. The others are permuted among themselves, then shifted past the
    skipped positions of the layer below.
    """

    cut: int
    size: int
    """Number of positions of the epoch in this layer."""
    seed: int
    epoch: int
    skipped: Indices
    """Positions of the layer below, at or after `cut`, sorted."""

    @cached_property
    def _unskipped_before(self) -> Indices:
        """For each skipped position, the number of positions before it that are not skipped."""
        return self.skipped - np.arange(len(self.skipped))

    def lower(self, positions: Indices) -> Indices:
        """Map positions of this layer to the layer below."""
        positions = positions.copy()
        later = positions >= self.cut
        positions[later] = self.cut + permute(
            positions[later] - self.cut, self.size - self.cut, self.seed, self.epoch
        )
        return positions + np.searchsorted(self._unskipped_before, positions, side="right")

    def raised(self, positions: Indices) -> Indices:
        """Map positions of the layer below, none of them skipped, to this layer."""
        positions = positions - np.searchsorted(self.skipped, positions)
        later = positions >= self.cut
        positions[later] = self.cut + permute(
            positions[later] - self.cut, self.size - self.cut, self.seed, self.epoch, inverse=True
        )
        return positions


@dataclasses.dataclass(frozen=True)
class Lineage:
    """The order of a run's blocks, after its rollbacks.

    Epoch e has `total` positions, less the blocks that are skipped in it; epochs follow each other.
    A lookup costs one `permute` per rollback within the epoch; memory is needed for the skipped
    blocks only.
    """

    total: int
    """Number of blocks of the corpus: an epoch without skips."""
    reorderings: tuple[Reordering, ...]
    """Oldest first; the first begins at position 0."""

    def __post_init__(self) -> None:
        """Check the reorderings: a gap or a wrong order would silently repeat blocks."""
        starts = [each.first_position for each in self.reorderings]
        assert self.total > 0, self.total
        assert starts[:1] == [0], starts
        assert starts == sorted(set(starts)), starts

    @classmethod
    def begin(cls, total: int, seed: int) -> Lineage:
        """The lineage of a run that was never rolled back."""
        return cls(total, (Reordering(0, seed),))

    def rolled_back(self, position: int, seed: int, skip: tuple[int, int] | None = None) -> Lineage:
        """The lineage that follows this one up to `position`, then continues with `seed`.

        Args:
            position: blocks before it count as read.
            seed: permutes the other blocks.
            skip: first and end position, in this lineage; its blocks there, from `position` on,
                will not be read in their epochs. Blocks that it had declared skipped from
                `position` on stay skipped.
        """
        kept = tuple(each for each in self.reorderings if each.first_position < position)
        skipped = [each.skipped for each in self.reorderings[len(kept) :]]
        if skip:
            first, end = max(skip[0], position), skip[1]
            blocks, epochs = self.blocks(first, max(0, end - first))
            skipped.append(np.column_stack([epochs, blocks]))
        return Lineage(self.total, (*kept, Reordering(position, seed, _sorted_names(skipped))))

    def skipped(self) -> tuple[Indices, Indices]:
        """Blocks declared skipped, and the epoch of each; sorted by epoch, then block."""
        names = _sorted_names([each.skipped for each in self.reorderings])
        return names[:, 1], names[:, 0]

    def epoch(self, position: int) -> float:
        """Epochs read before a position; skipped blocks count as read once they are declared."""
        (number,) = self._epochs(np.array([position]))
        declared = (s.skipped for s in self.reorderings if s.first_position <= position)
        return (position + sum(int((s[:, 0] <= number).sum()) for s in declared)) / self.total

    def blocks(self, first_position: int, count: int) -> tuple[Indices, Indices]:
        """Blocks at positions [first_position, first_position + count), and the epoch of each."""
        positions = np.arange(first_position, first_position + count, dtype=np.int64)
        epochs = self._epochs(positions)
        blocks = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found = positions[chosen] - self.start(epoch)
            for layer in reversed(_layers(self, epoch)):
                found = layer.lower(found)
            blocks[chosen] = found
        return blocks, epochs

    @cached_property
    def _skips(self) -> tuple[Indices, Indices]:
        """The epoch of each skipped block, sorted, and the end of each of these epochs."""
        epochs = self.skipped()[1]
        return epochs, (epochs + 1) * self.total - np.searchsorted(epochs, epochs, side="right")

    def start(self, epoch: int) -> int:
        """First position of an epoch."""
        return epoch * self.total - int(np.searchsorted(self._skips[0], epoch))

    def _epochs(self, positions: Indices) -> Indices:
        """The epoch of each position."""
        return (positions + np.searchsorted(self._skips[1], positions, side="right")) // self.total


@lru_cache
def _layers(lineage: Lineage, epoch: int) -> list[_Layer]:
    """Reorderings of the blocks of an epoch, oldest first; the first maps to block indices."""
    start, end = lineage.start(epoch), lineage.start(epoch + 1)
    layers: list[_Layer] = []
    unread = _no_names()[:, 1]
    for each in lineage.reorderings:
        skipped = each.skipped[each.skipped[:, 0] == epoch, 1]
        if each.first_position <= start:
            # No block of the epoch was read: its order is drawn anew.
            unread = np.union1d(unread, skipped)
            layers = [_Layer(0, lineage.total - len(unread), each.seed, epoch, unread)]
        elif each.first_position < end:
            cut, size = each.first_position - start, layers[-1].size - len(skipped)
            for layer in layers:
                skipped = layer.raised(skipped)
            layers.append(_Layer(cut, size, each.seed, epoch, np.sort(skipped)))
    return layers


def _sorted_names(parts: list[Indices]) -> Indices:
    """The names of all parts, [K, 2], sorted by epoch, then block."""
    names = np.concatenate([_no_names(), *parts])
    return names[np.lexsort((names[:, 1], names[:, 0]))]
