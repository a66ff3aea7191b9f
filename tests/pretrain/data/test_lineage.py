"""The block order and its history of rollbacks and skips."""

import hashlib
import pickle
import random
from collections import Counter

import numpy as np
import pytest

from pretrain.data import permutation
from pretrain.data.lineage import Lineage, Reordering, digest


def names(lineage, first_position, count):
    """(epoch, block) at each of some positions."""
    blocks, epochs = lineage.blocks(first_position, count)
    return list(zip(epochs.tolist(), blocks.tolist(), strict=True))


@pytest.mark.parametrize(
    ("total", "rollbacks", "first_position", "count", "expected"),
    [
        (97, [], 0, 500, "ac4c07e928e0b5d9"),
        (97, [(30, 2), (140, 9)], 0, 500, "f7fea05e18a96eaa"),
        (1000, [(600, -3), (1000, 4), (1700, 2**63)], 13, 2500, "c8a994b1759471a3"),
        (200_000_000, [(300_000_000, 2)], 399_999_700, 512, "3c6f0ad79fda2178"),
        (1, [(3, 2)], 0, 6, "bfb4db35a01ea10e"),
        (5, [(2, 7), (3, 8), (4, 9)], 0, 15, "e12fa639fd2fead0"),
        (97, [(30, 2, (40, 60)), (20, 9, (25, 35))], 0, 500, "f7453552819f483d"),
    ],
)
def test_a_run_of_an_older_version_continues_with_the_same_order(
    total, rollbacks, first_position, count, expected
):
    """The digests are those of version 0.1.0, which had no skips, and of the first that had."""
    lineage = Lineage.begin(total, 1)
    for rollback in rollbacks:
        lineage = lineage.rolled_back(*rollback)
    blocks, epochs = lineage.blocks(first_position, count)
    content = blocks.tobytes() + epochs.tobytes()
    assert hashlib.blake2b(content, digest_size=8).hexdigest() == expected


class Walk:
    """A run on a lineage: the blocks it read, in order, and those declared skipped."""

    def __init__(self, total, seed):
        self.lineage = Lineage.begin(total, seed)
        self.consumed, self.skipped = [], []

    def read(self, draw, count):
        """Read blocks, in chunks of any size."""
        end = len(self.consumed) + count
        while len(self.consumed) < end:
            chunk = draw.randrange(1, end - len(self.consumed) + 1)
            self.consumed += names(self.lineage, len(self.consumed), chunk)

    def roll_back(self, position, seed, skip):
        """Abandon the blocks read from `position` on; those in `skip` must not be read."""
        if skip:
            first = max(position, skip[0])
            self.skipped += names(self.lineage, first, max(0, skip[1] - first))
        self.lineage = self.lineage.rolled_back(position, seed, skip)
        del self.consumed[position:]

    def check(self):
        """Check law 3 for the blocks that were read, in all their epochs."""
        lineage, total = self.lineage, self.lineage.total
        assert names(lineage, 0, len(self.consumed)) == self.consumed
        found = [(epoch, b) for epoch in range(50) for b in lineage.skipped(epoch).tolist()]
        assert found == sorted(self.skipped)
        assert lineage.skipped_count == len(found)
        assert len(set(self.skipped)) == len(self.skipped)
        epochs = max([epoch for epoch, _ in self.consumed + self.skipped], default=0) + 1
        left = Counter((epoch, block) for epoch in range(epochs) for block in range(total))
        left.subtract(self.skipped)
        positions = epochs * total - len(self.skipped)
        assert Counter(names(lineage, 0, positions)) == +left
        assert names(lineage, positions, 1)[0][0] == epochs
        gone = [lineage.epoch(position) for position in [*range(0, positions, 7), positions]]
        assert gone == sorted(gone)
        assert gone[-1] == epochs


def random_skip(draw, position, reached, total):
    """None, or positions around those that were read, sometimes more than an epoch."""
    kind = draw.randrange(4)
    if kind == 0:
        return None
    first = draw.randrange(max(0, position - 3), reached + 3)
    return first, first + draw.randrange([2, total + 1, 3 * total + 2][kind - 1])


@pytest.mark.parametrize("number", range(100))
def test_every_block_is_used_once_per_epoch_except_declared_skips(number):
    """Law 3 for random histories, checked against a list of the blocks that a run reads."""
    draw = random.Random(number)
    total = draw.randrange(1, 61)
    walk = Walk(total, draw.randrange(10))
    for seed in range(100, 100 + draw.randrange(1, 6)):
        walk.read(draw, draw.randrange(draw.choice([2 * total, total // 3]) + 1))
        reached = len(walk.consumed)
        near = reached - draw.randrange(min(reached, 9) + 1)
        position = draw.choice([near, near, draw.randrange(reached + 1), reached // total * total])
        walk.roll_back(position, seed, random_skip(draw, position, reached, total))
        walk.check()
    walk.read(draw, draw.randrange(total + 1))
    walk.check()


def test_a_skipped_block_counts_as_read_in_its_epoch_once_declared():
    here = Lineage.begin(50, 1).rolled_back(20, 2, (25, 35))
    assert [50 * here.epoch(position) for position in (19, 20, 39, 40, 41)] == [19, 30, 49, 50, 51]
    later = Lineage.begin(50, 1).rolled_back(20, 2, (60, 70))
    assert [50 * later.epoch(p) for p in (20, 49, 50, 89, 90)] == [20, 49, 60, 99, 100]


@pytest.mark.parametrize("seeds", [(), ((1, 1),), ((0, 1), (0, 2))])
def test_a_lineage_that_would_repeat_blocks_is_an_error(seeds):
    with pytest.raises(AssertionError):
        Lineage(10, tuple(Reordering(*each) for each in seeds))


def test_identities_of_reorderings_differ_in_every_field():
    lineages = [
        Lineage.begin(50, 1).rolled_back(20, 2),
        Lineage.begin(50, 1).rolled_back(21, 2),
        Lineage.begin(50, 1).rolled_back(20, 3),
        Lineage.begin(50, 1).rolled_back(20, 2, (20, 25)),
        Lineage.begin(50, 1).rolled_back(20, 2, (21, 26)),
    ]
    identities = [lineage.identities[-1] for lineage in lineages]
    assert len(set(identities)) == 5
    assert identities[3] == (20, 2, 5, "c56b8c5346fafc2b")
    further_back = Lineage.begin(50, 1).rolled_back(20, 2, (60, 70)).rolled_back(10, 3, (20, 25))
    assert further_back.identities[1:] == [(10, 3, 15, "9ed19743cd7ac116")]


def test_seeking_in_two_hundred_million_blocks_computes_only_the_requested_positions(monkeypatch):
    """Arrays are as long as the request, whatever the size of the corpus and of what is skipped."""
    total = 200_000_000
    touched = []
    mix = permutation._mix

    def counting(x, key):
        touched.append(x.size)
        return mix(x, key)

    monkeypatch.setattr(permutation, "_mix", counting)
    position, window = 3 * total // 2, total // 100  # skipped
    skipped = (position + 9, position + 9 + window)
    lineage = Lineage.begin(total, 1).rolled_back(position, 2, skipped)
    blocks, epochs = lineage.blocks(2 * total - window - 300, 512)
    assert len(np.unique(blocks[:300])) == 300
    assert (epochs[:300] == 1).all()
    assert (epochs[300:] == 2).all()
    assert blocks.max() < total
    assert max(touched) <= 512
    assert len(pickle.dumps(lineage)) < 2000
    # on average at most four iterations per position and permutation; at most three permutations
    assert sum(touched) <= 512 * 6 * 4 * 3


def test_the_digest_of_a_batch_can_be_recounted_with_hashlib_alone():
    """By the words of `digest`: epoch and number of each block, 8 bytes each, lowest byte first."""
    blocks, epochs = [7, 2**33 + 1, 0], [0, 3, 12]
    content = b"".join(
        number.to_bytes(8, "little", signed=True)
        for name in zip(epochs, blocks, strict=True)
        for number in name
    )
    expected = hashlib.blake2b(content, digest_size=8).hexdigest()
    assert digest(np.array(blocks), np.array(epochs)) == expected
