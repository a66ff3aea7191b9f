"""Which block comes when: a seeded permutation that needs no memory, and its history.

A run counts the places of its blocks over all epochs. Within an epoch the order is a pseudo-random
permutation, computed a place at a time, so that 200 million blocks cost nothing to shuffle or to
seek in. A rollback to a place leaves what was consumed before it alone, permutes the other blocks
of the epoch among themselves, and may declare some of them skipped: whatever the history, every
block is used exactly once an epoch, but for the skipped ones.

Imports numpy only. Read `Lineage`, then `_Layer`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cached_property

import numpy as np

from pretrain.data.permutation import Places, permute


def digest(blocks: Places, epochs: Places) -> str:
    """Hash, 16 hexadecimal digits, of the names (epoch, block) in their order."""
    names = np.column_stack([epochs, blocks]).astype("<i8")
    return hashlib.blake2b(names.tobytes(), digest_size=8).hexdigest()


def _no_names() -> Places:
    return np.empty((0, 2), dtype=np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """From place `first_place` on, `seed` is in force and `skipped` is not read."""

    first_place: int
    seed: int
    skipped: Places = dataclasses.field(default_factory=_no_names)
    """Names of blocks, (epoch, block) [K, 2], sorted: no range of places outlives a rollback."""

    @cached_property
    def identity(self) -> tuple[int, int, int, str]:
        """First place, seed, number of skipped blocks, hash of their names: for a manifest."""
        epochs, blocks = self.skipped.T
        return self.first_place, self.seed, len(self.skipped), digest(blocks, epochs)

    @cached_property
    def _epochs(self) -> Places:
        return np.ascontiguousarray(self.skipped[:, 0])

    def skipped_before(self, epoch: int) -> int:
        """How many blocks of earlier epochs are skipped."""
        return int(np.searchsorted(self._epochs, epoch))

    def skipped_in(self, epoch: int) -> Places:
        """The skipped blocks of one epoch, sorted."""
        return self.skipped[self.skipped_before(epoch) : self.skipped_before(epoch + 1), 1]

    def __eq__(self, other: object) -> bool:
        """Whether both say the same."""
        return isinstance(other, Segment) and self.identity == other.identity

    def __hash__(self) -> int:
        """Of `identity`."""
        return hash(self.identity)

    def __reduce__(self) -> tuple[type[Segment], tuple[int, int, Places]]:
        """Pickles without what was computed."""
        return Segment, (self.first_place, self.seed, self.skipped)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One rearrangement of what is left of an epoch: it maps its places to the layer below.

    Places below `cut` stay. The others are permuted among themselves, then moved up past the
    places of the layer below that are skipped.
    """

    cut: int
    size: int
    """Places that the epoch has in this layer."""
    seed: int
    epoch: int
    skipped: Places
    """Places of the layer below, at or after `cut`, sorted."""

    @cached_property
    def _unskipped_before(self) -> Places:
        """Of each skipped place, how many before it are not skipped."""
        return self.skipped - np.arange(len(self.skipped))

    def lower(self, places: Places) -> Places:
        """Where places of this layer lie in the layer below."""
        places = places.copy()
        later = places >= self.cut
        places[later] = self.cut + permute(
            places[later] - self.cut, self.size - self.cut, self.seed, self.epoch
        )
        return places + np.searchsorted(self._unskipped_before, places, side="right")

    def raised(self, places: Places) -> Places:
        """Where places of the layer below, none of them skipped, lie in this one."""
        places = places - np.searchsorted(self.skipped, places)
        later = places >= self.cut
        places[later] = self.cut + permute(
            places[later] - self.cut, self.size - self.cut, self.seed, self.epoch, inverse=True
        )
        return places


@dataclasses.dataclass(frozen=True)
class Lineage:
    """The order of a run's blocks, as its rollbacks have made it.

    Epoch e has `total` places less the blocks that are skipped in it; the epochs follow each other.
    Lookups cost a few turns of `permute` for each rollback within the epoch, and memory for the
    skipped blocks alone.
    """

    total: int
    """Blocks of the corpus: an epoch without skips."""
    segments: tuple[Segment, ...]
    """Oldest first; the first begins at place 0."""

    def __post_init__(self) -> None:
        """A lineage without a beginning, or out of order, would silently repeat blocks."""
        starts = [segment.first_place for segment in self.segments]
        assert self.total > 0, self.total
        assert starts[:1] == [0], starts
        assert starts == sorted(set(starts)), starts

    @classmethod
    def begin(cls, total: int, seed: int) -> Lineage:
        """The lineage of a run that was never rolled back."""
        return cls(total, (Segment(0, seed),))

    def rolled_back(self, place: int, seed: int, skip: tuple[int, int] | None = None) -> Lineage:
        """The lineage that goes on from `place` with `seed`, this one being abandoned there.

        Args:
            place: what was consumed before it stays so.
            seed: permutes the other blocks.
            skip: first and end place, in this lineage; the blocks that it has there, from `place`
                on, will not be read in their epochs. Nor will those whose skip it had declared.
        """
        kept = tuple(segment for segment in self.segments if segment.first_place < place)
        skipped = [segment.skipped for segment in self.segments[len(kept) :]]
        if skip:
            first, end = max(skip[0], place), skip[1]
            blocks, epochs = self.blocks(first, max(0, end - first))
            skipped.append(np.column_stack([epochs, blocks]))
        return Lineage(self.total, (*kept, Segment(place, seed, _sorted_names(skipped))))

    def seed_at(self, place: int) -> int:
        """The seed in force at a place."""
        return next(s.seed for s in reversed(self.segments) if s.first_place <= place)

    def skipped(self) -> tuple[Places, Places]:
        """Blocks declared skipped, and the epoch of each; sorted by epoch, then block."""
        names = _sorted_names([segment.skipped for segment in self.segments])
        return names[:, 1], names[:, 0]

    def epoch(self, place: int) -> float:
        """Epochs read before a place; what is skipped, as read from its declaration on."""
        number = self._epoch_of(place)
        declared = (s for s in self.segments if s.first_place <= place)
        return (place + sum(s.skipped_before(number + 1) for s in declared)) / self.total

    def blocks(self, first_place: int, count: int) -> tuple[Places, Places]:
        """Blocks at places [first_place, first_place + count), and the epoch of each."""
        places = np.arange(first_place, first_place + count, dtype=np.int64)
        epochs = self._epochs(places)
        blocks = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found = places[chosen] - self._start(epoch)
            for layer in reversed(self._layers(epoch)):
                found = layer.lower(found)
            blocks[chosen] = found
        return blocks, epochs

    def digest(self, first_place: int, count: int) -> str:
        """`digest` of what is at places [first_place, first_place + count)."""
        return digest(*self.blocks(first_place, count))

    @cached_property
    def _skips(self) -> tuple[Places, Places]:
        """The epochs with skips, ascending; of each, the blocks skipped before its end."""
        epochs, counts = np.unique(self.skipped()[1], return_counts=True)
        return epochs, np.cumsum(counts)

    def _start(self, epoch: int) -> int:
        """First place of an epoch."""
        epochs, skipped = self._skips
        before = int(np.searchsorted(epochs, epoch))
        return epoch * self.total - (int(skipped[before - 1]) if before else 0)

    def _epoch_of(self, place: int) -> int:
        return int(self._epochs(np.array([place]))[0])

    def _epochs(self, places: Places) -> Places:
        """The epoch of each place."""
        epochs, skipped = self._skips
        ends = (epochs + 1) * self.total - skipped
        before = np.searchsorted(ends, places, side="right")
        numbers: Places = (places + np.concatenate([[0], skipped])[before]) // self.total
        return numbers

    @cached_property
    def _known_layers(self) -> dict[int, list[_Layer]]:
        return {}

    def _layers(self, epoch: int) -> list[_Layer]:
        """How the blocks of an epoch were rearranged, oldest first; below the first lie all."""
        if epoch not in self._known_layers:
            self._known_layers[epoch] = self._build_layers(epoch)
        return self._known_layers[epoch]

    def _build_layers(self, epoch: int) -> list[_Layer]:
        layers: list[_Layer] = []
        unread = _no_names()[:, 1]
        for segment in self.segments:
            # A segment that skips the rest of its epoch begins in the next.
            begun = self._epoch_of(segment.first_place)
            cut = segment.first_place - self._start(begun)
            skipped = segment.skipped_in(epoch)
            if begun < epoch or (begun, cut) == (epoch, 0):
                # Nothing of the epoch was read: its order begins anew.
                unread = np.union1d(unread, skipped)
                layers = [_Layer(0, self.total - len(unread), segment.seed, epoch, unread)]
            elif begun == epoch:
                size = layers[-1].size - len(skipped)
                for layer in layers:
                    skipped = layer.raised(skipped)
                layers.append(_Layer(cut, size, segment.seed, epoch, np.sort(skipped)))
        return layers

    def __reduce__(self) -> tuple[type[Lineage], tuple[int, tuple[Segment, ...]]]:
        """Pickles without what was computed."""
        return Lineage, (self.total, self.segments)


def _sorted_names(parts: list[Places]) -> Places:
    """All names of the parts, [K, 2], sorted by epoch, then block."""
    names = np.concatenate([_no_names(), *parts])
    return names[np.lexsort((names[:, 1], names[:, 0]))]
