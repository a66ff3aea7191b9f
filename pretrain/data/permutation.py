"""A pseudo-random permutation of 0 .. count - 1 that needs no memory. Imports numpy only."""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_ROUNDS = 6
_CHUNK = 1 << 17
"""Indices that are permuted at once: these stay in a core's cache."""
_SHIFTS = np.array([30, 27, 31], dtype=np.uint64)
_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)


def _mix(x: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 over x + key: every input bit affects every output bit."""
    x = x + key
    x ^= x >> _SHIFTS[0]
    x *= _FACTORS[0]
    x ^= x >> _SHIFTS[1]
    x *= _FACTORS[1]
    x ^= x >> _SHIFTS[2]
    return x


def permute(indices: Indices, count: int, seed: int, epoch: int) -> Indices:
    """Image of `indices` under a permutation of 0 .. count - 1 drawn from (seed, epoch).

    A Feistel network over the next power of four, iterated until the value is below `count` (Black
    and Rogaway 2002, cycle walking): O(1) memory, at most four iterations per index on average.

    Args:
        indices: numbers in [0, count).
        count: how many numbers are permuted.
        seed: any integer.
        epoch: any integer.
    """
    if count <= 1:
        return indices.copy()
    half = max(1, (int(count - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    entropy = np.random.SeedSequence([abs(seed), int(seed < 0), epoch])
    keys = entropy.generate_state(_ROUNDS, np.uint64)
    values = indices.astype(np.uint64)
    for first in range(0, len(values), _CHUNK):
        part = values[first : first + _CHUNK]
        outside = np.arange(len(part))
        while len(outside):
            x = part[outside]
            left, right = x >> shift, x & low
            for key in keys:
                left, right = right, left ^ (_mix(right, key) & low)
            part[outside] = (left << shift) | right
            outside = outside[part[outside] >= np.uint64(count)]
    return values.astype(np.int64)
