"""Which block comes when: a seeded permutation that needs no memory, and its history of reseeds.

A run counts the places of its blocks: place p belongs to epoch p // N and holds one of the N
blocks. Within an epoch the order is a pseudo-random permutation, computed a place at a time, so
that 200 million blocks cost nothing to shuffle or to seek in. A reseed at place c permutes the
blocks from c on among themselves and leaves what was consumed alone: whatever the history, every
block is used exactly once an epoch.

Imports numpy only. Read `permute`, then `Lineage`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
Places = npt.NDArray[np.int64]


def _mix(x: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser over x + key: every bit of the input moves every bit of the output."""
    x = x + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(places: Places, count: int, seed: int, epoch: int) -> Places:
    """Image of `places` under a permutation of 0 .. count - 1 drawn by (seed, epoch).

    A Feistel network over the next power of four, walked until it falls inside `count` (Black and
    Rogaway 2002, cycle walking): O(1) memory, at most four turns a place on average.

    Args:
        places: numbers in [0, count).
        count: how many are permuted.
        seed: any whole number.
        epoch: any whole number.
    """
    if count <= 1:
        return places.copy()
    half = max(1, (int(count - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    draws = np.random.SeedSequence([abs(seed), int(seed < 0), epoch]).generate_state(
        _ROUNDS, np.uint64
    )
    keys = [int(key) for key in draws]
    values = places.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    with np.errstate(over="ignore"):
        while outside.any():
            x = values[outside]
            left, right = x >> shift, x & low
            for key in keys:
                left, right = right, left ^ (_mix(right, key) & low)
            values[outside] = (left << shift) | right
            outside = values >= np.uint64(count)
    return values.astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Segment:
    """From place `first_place` on, `seed` is in force."""

    first_place: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Lineage:
    """The reseeds that a run has behind it, oldest first; the first segment starts at 0."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        """A lineage without a beginning, or out of order, would silently repeat blocks."""
        starts = [segment.first_place for segment in self.segments]
        assert starts[:1] == [0], starts
        assert starts == sorted(set(starts)), starts

    def reseeded(self, place: int, seed: int) -> Lineage:
        """The lineage after a rollback to `place` that goes on with `seed`."""
        kept = tuple(segment for segment in self.segments if segment.first_place < place)
        return Lineage((*kept, Segment(place, seed)))

    def seed_at(self, place: int) -> int:
        """The seed in force at a place."""
        return max(
            (segment for segment in self.segments if segment.first_place <= place),
            key=lambda segment: segment.first_place,
        ).seed

    def blocks(self, first_place: int, count: int, total: int) -> tuple[Places, Places]:
        """Blocks at places [first_place, first_place + count), and the epoch of each.

        Args:
            first_place: counted over all epochs.
            count: how many.
            total: blocks of an epoch.
        """
        places = np.arange(first_place, first_place + count, dtype=np.int64)
        epochs = places // total
        blocks = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            blocks[chosen] = self._within(int(epoch), places[chosen] - int(epoch) * total, total)
        return blocks, epochs

    def _within(self, epoch: int, places: Places, total: int) -> Places:
        """Blocks at places of one epoch: the newest reseed permutes first, the oldest last."""
        start = epoch * total
        inside = [s for s in self.segments if start < s.first_place < start + total]
        result = places
        for segment in reversed(inside):
            cut = segment.first_place - start
            later = result >= cut
            result = result.copy()
            result[later] = cut + permute(result[later] - cut, total - cut, segment.seed, epoch)
        return permute(result, total, self.seed_at(start), epoch)
