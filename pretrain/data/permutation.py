"""A pseudo-random permutation of 0 .. count - 1 that needs no memory. Imports numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
_ROUNDS = 6
_SHIFTS = np.array([30, 27, 31], dtype=np.uint64)
_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)


def _mix(x: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser over x + key: every bit of the input moves every bit of the output."""
    x = x + key
    x ^= x >> _SHIFTS[0]
    x *= _FACTORS[0]
    x ^= x >> _SHIFTS[1]
    x *= _FACTORS[1]
    x ^= x >> _SHIFTS[2]
    return x


def permute(places: Places, count: int, seed: int, epoch: int, *, inverse: bool = False) -> Places:
    """Image of `places` under a permutation of 0 .. count - 1 drawn by (seed, epoch).

    A Feistel network over the next power of four, walked until it falls inside `count` (Black and
    Rogaway 2002, cycle walking): O(1) memory, at most four turns a place on average.

    Args:
        places: numbers in [0, count).
        count: how many are permuted.
        seed: any whole number.
        epoch: any whole number.
        inverse: give the places whose image `places` are.
    """
    if count <= 1:
        return places.copy()
    half = max(1, (int(count - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    entropy = np.random.SeedSequence([abs(seed), int(seed < 0), epoch])
    keys = list(entropy.generate_state(_ROUNDS, np.uint64))
    if inverse:
        # The rounds backwards are the rounds forwards, with halves and keys the other way round.
        keys.reverse()
    values = places.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    with np.errstate(over="ignore"):
        while outside.any():
            x = values[outside]
            left, right = x >> shift, x & low
            if inverse:
                left, right = right, left
            for key in keys:
                left, right = right, left ^ (_mix(right, key) & low)
            if inverse:
                left, right = right, left
            values[outside] = (left << shift) | right
            outside = values >= np.uint64(count)
    return values.astype(np.int64)
