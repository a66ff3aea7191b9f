"""The order of one corpus's blocks: a seeded permutation that needs no memory, and its history.

Positions in the order count the blocks of all epochs. Within an epoch the order is a pseudo-random
permutation, computed per position, so that 200 million blocks cost nothing to shuffle or to seek
in. A rollback to a position keeps the order before it, permutes the other blocks of the epoch anew,
and may declare some of them skipped. Whatever the history, every block is used exactly once per
epoch, except the skipped ones.

Imports numpy only. Read `Lineage`, then `_Layer`.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache

import numpy as np

from pretrain.data.permutation import Indices, permute

_NO_RUNS: Indices = np.empty((0, 2), dtype=np.int64)


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


@dataclasses.dataclass(frozen=True, eq=False)
class Reordering:
    """From `first_position` on, blocks are ordered by `seed`, and `skipped` is not read."""

    first_position: int
    seed: int
    skipped: Mapping[int, Indices] = dataclasses.field(default_factory=dict)
    """By epoch, runs [n, 2] of positions of the layers below, or of blocks where no block of the
    epoch was read: first and end of each, sorted. A window of steps is one run, however long."""

    @cached_property
    def counts(self) -> Counter[int]:
        """Number of skipped blocks by epoch."""
        return Counter({epoch: _length(runs) for epoch, runs in self.skipped.items()})


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
    """Runs of positions of the layer below, at or after `cut`, sorted."""

    @cached_property
    def _shifts(self) -> tuple[Indices, Indices]:
        """First positions of this layer with another shift than those before, and all shifts."""
        shifts = np.append(0, np.diff(self.skipped).cumsum())
        return self.skipped[:, 0] - shifts[:-1], shifts

    def lower(self, positions: Indices) -> Indices:
        """Map positions of this layer to the layer below."""
        positions = positions.copy()
        later = positions >= self.cut
        positions[later] = self.cut + permute(
            positions[later] - self.cut, self.size - self.cut, self.seed, self.epoch
        )
        firsts, shifts = self._shifts
        return positions + shifts[np.searchsorted(firsts, positions, side="right")]


@dataclasses.dataclass(frozen=True)
class Lineage:
    """The order of a run's blocks, after its rollbacks.

    Epoch e has `total` positions, less the blocks that are skipped in it; epochs follow each other.
    A lookup costs one `permute` per rollback within the epoch. What a rollback skips costs memory
    only if blocks that were skipped before are among it.
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

    def until(self, position: int) -> Lineage:
        """The lineage without the rollbacks to positions after one."""
        kept = (each for each in self.reorderings if each.first_position <= position)
        return dataclasses.replace(self, reorderings=tuple(kept))

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
        found = [
            (epoch, self._skipped_by(each, epoch, position))
            for each in self.reorderings[len(kept) :]
            for epoch in each.skipped
        ]
        if skip:
            parts = self._by_epoch(max(skip[0], position), skip[1])
            found += [(epoch, self._lowered(part, epoch, position)) for epoch, part in parts]
        skipped = {
            epoch: _runs([part for other, part in found if other == epoch]) for epoch, _ in found
        }
        return Lineage(self.total, (*kept, Reordering(position, seed, skipped)))

    @cached_property
    def identities(self) -> list[tuple[int, int, int, str]]:
        """Of each reordering what a manifest has of it: see `_identity`."""
        ends = range(1, len(self.reorderings) + 1)
        return [_identity(Lineage(self.total, self.reorderings[:end])) for end in ends]

    def skipped(self, epoch: int) -> Indices:
        """Blocks declared skipped in an epoch, sorted."""
        return np.sort(np.concatenate([self._skipped_by(each, epoch) for each in self.reorderings]))

    @property
    def skipped_count(self) -> int:
        """Number of blocks declared skipped, of all epochs."""
        return self._skips[2][-1]

    def _skipped_by(self, reordering: Reordering, epoch: int, position: int = 0) -> Indices:
        """What a reordering skips in an epoch, below the layers that begin at a position or later.

        These are blocks where the position is 0.
        """
        runs = reordering.skipped.get(epoch, _NO_RUNS)
        lengths = np.diff(runs)[:, 0]
        shifts = runs[:, 0] - (np.cumsum(lengths) - lengths)
        positions = np.arange(lengths.sum()) + np.repeat(shifts, lengths)
        return self._lowered(positions, epoch, position, reordering.first_position)

    def _lowered(
        self, positions: Indices, epoch: int, first: int = 0, end: float = math.inf
    ) -> Indices:
        """Map positions within an epoch through its layers that begin at `first` to `end`."""
        start = self.start(epoch)
        for layer in reversed(_layers(self, epoch)):
            if first <= start + layer.cut < end:
                positions = layer.lower(positions)
        return positions

    def epoch(self, position: int) -> float:
        """Epochs read before a position; skipped blocks count as read once they are declared."""
        number = self._epoch_of(position)
        declared = (s.counts.items() for s in self.reorderings if s.first_position <= position)
        skipped = sum(count for s in declared for epoch, count in s if epoch <= number)
        return (position + skipped) / self.total

    def blocks(self, first_position: int, count: int) -> tuple[Indices, Indices]:
        """Blocks at positions [first_position, first_position + count), and the epoch of each."""
        parts = self._by_epoch(first_position, first_position + count)
        return _names([(epoch, self._lowered(part, epoch)) for epoch, part in parts])

    def _by_epoch(self, first: int, end: int) -> Iterator[tuple[int, Indices]]:
        """Yield each epoch of some positions, and where they are within it."""
        while first < end:
            epoch = self._epoch_of(first)
            start, stop = self.start(epoch), min(end, self.start(epoch + 1))
            yield epoch, np.arange(first - start, stop - start)
            first = stop

    @cached_property
    def _skips(self) -> tuple[list[int], list[int], list[int]]:
        """Epochs with skipped blocks [n], the end of each [n], skipped before each [n + 1]."""
        counts = sum((each.counts for each in self.reorderings), Counter[int]())
        epochs = sorted(counts)
        skipped = list(itertools.accumulate((counts[epoch] for epoch in epochs), initial=0))
        ends = [self.total * (e + 1) - n for e, n in zip(epochs, skipped[1:], strict=True)]
        return epochs, ends, skipped

    def start(self, epoch: int) -> int:
        """First position of an epoch."""
        epochs, _, skipped = self._skips
        return epoch * self.total - skipped[bisect.bisect_left(epochs, epoch)]

    def _epoch_of(self, position: int) -> int:
        _, ends, skipped = self._skips
        return (position + skipped[bisect.bisect_right(ends, position)]) // self.total


@cache
def _identity(lineage: Lineage) -> tuple[int, int, int, str]:
    """Of the newest reordering first position, seed, number of skipped blocks, hash of their names.

    Names are sorted by epoch, then block.
    """
    newest = lineage.reorderings[-1]
    found = [(e, np.sort(lineage._skipped_by(newest, e))) for e in sorted(newest.skipped)]
    return newest.first_position, newest.seed, newest.counts.total(), digest(*_names(found))


@lru_cache
def _layers(lineage: Lineage, epoch: int) -> list[_Layer]:
    """Reorderings of the blocks of an epoch, oldest first; the first maps to block indices."""
    start, end = lineage.start(epoch), lineage.start(epoch + 1)
    layers: list[_Layer] = []
    unread = _NO_RUNS
    for each in lineage.reorderings:
        skipped = each.skipped.get(epoch, _NO_RUNS)
        if each.first_position <= start:
            # No block of the epoch was read: its order is drawn anew.
            unread = np.sort(np.concatenate([unread, skipped]), axis=0)
            layers = [_Layer(0, lineage.total - _length(unread), each.seed, epoch, unread)]
        elif each.first_position < end:
            cut, size = each.first_position - start, layers[-1].size - _length(skipped)
            layers.append(_Layer(cut, size, each.seed, epoch, skipped))
    return layers


def _length(runs: Indices) -> int:
    """Number of positions of runs."""
    return int(np.diff(runs).sum())


def _runs(parts: Sequence[Indices]) -> Indices:
    """Join positions, of which there is at least one, to runs."""
    positions = np.sort(np.concatenate(parts))
    breaks = np.flatnonzero(np.diff(positions) > 1)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, -1)
    return np.column_stack([positions[firsts], positions[lasts] + 1])


def _names(found: Sequence[tuple[int, Indices]]) -> tuple[Indices, Indices]:
    """Join blocks of several epochs; returns them and the epoch of each."""
    blocks = [blocks for _, blocks in found]
    epochs = [np.full_like(blocks, epoch) for epoch, blocks in found]
    return np.concatenate([_NO_RUNS[:, 0], *blocks]), np.concatenate([_NO_RUNS[:, 0], *epochs])
