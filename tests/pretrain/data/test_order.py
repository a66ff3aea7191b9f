"""The block order and its history of rollbacks and skips."""

import hashlib
import pickle
import random
from collections import Counter

import numpy as np
import pytest

from pretrain.data import permutation
from pretrain.data.order import Lineage, Segment


def start(total, seed=1):
    return Lineage.begin(total, seed)


def names(lineage, first_position, count):
    """(epoch, block) at each of some places."""
    blocks, epochs = lineage.blocks(first_position, count)
    return list(zip(epochs.tolist(), blocks.tolist(), strict=True))


def skipped_names(lineage):
    blocks, epochs = lineage.skipped()
    return list(zip(epochs.tolist(), blocks.tolist(), strict=True))


@pytest.mark.parametrize(
    ("total", "rollbacks", "first_position", "count", "digest"),
    [
        (97, [], 0, 500, "ac4c07e928e0b5d9"),
        (97, [(30, 2), (140, 9)], 0, 500, "f7fea05e18a96eaa"),
        (1000, [(600, -3), (1000, 4), (1700, 2**63)], 13, 2500, "c8a994b1759471a3"),
        (200_000_000, [(300_000_000, 2)], 399_999_700, 512, "3c6f0ad79fda2178"),
        (1, [(3, 2)], 0, 6, "bfb4db35a01ea10e"),
        (5, [(2, 7), (3, 8), (4, 9)], 0, 15, "e12fa639fd2fead0"),
    ],
)
def test_a_run_that_began_with_an_older_version_goes_on_with_the_same_order(
    total, rollbacks, first_position, count, digest
):
    """The digests were taken from the version that knew no skips (0.1.0)."""
    lineage = start(total)
    for place, seed in rollbacks:
        lineage = lineage.rolled_back(place, seed)
    blocks, epochs = lineage.blocks(first_position, count)
    content = blocks.tobytes() + epochs.tobytes()
    assert hashlib.blake2b(content, digest_size=8).hexdigest() == digest


def test_any_stretch_is_a_slice_of_the_whole_epochs_included():
    lineage = start(97).rolled_back(30, 2).rolled_back(140, 9)
    blocks, epochs = lineage.blocks(0, 500)
    for first, count in [(0, 1), (13, 50), (90, 20), (97, 97), (123, 377), (499, 1), (250, 0)]:
        some, of_epochs = lineage.blocks(first, count)
        assert np.array_equal(some, blocks[first : first + count])
        assert np.array_equal(of_epochs, epochs[first : first + count])
    assert np.array_equal(epochs, np.arange(500) // 97)


class Walk:
    """A run on a lineage: what it consumed, in order, and what was declared skipped."""

    def __init__(self, total, seed):
        self.lineage = start(total, seed)
        self.consumed, self.skipped = [], []

    def read(self, draw, count):
        """Consume places, in chunks as they come."""
        end = len(self.consumed) + count
        while len(self.consumed) < end:
            chunk = draw.randrange(1, end - len(self.consumed) + 1)
            self.consumed += names(self.lineage, len(self.consumed), chunk)

    def roll_back(self, place, seed, skip):
        """Abandon what was consumed from `place` on; what lies in `skip` is never to be read."""
        if skip:
            first = max(place, skip[0])
            self.skipped += names(self.lineage, first, max(0, skip[1] - first))
        self.lineage = self.lineage.rolled_back(place, seed, skip)
        del self.consumed[place:]

    def check(self):
        """Law 3, of the prefix that was consumed and of the epochs that it reaches into."""
        lineage, total = self.lineage, self.lineage.total
        assert names(lineage, 0, len(self.consumed)) == self.consumed
        assert skipped_names(lineage) == sorted(self.skipped)
        assert len(set(self.skipped)) == len(self.skipped)
        epochs = max([epoch for epoch, _ in self.consumed + self.skipped], default=0) + 1
        left = Counter((epoch, block) for epoch in range(epochs) for block in range(total))
        left.subtract(self.skipped)
        places = epochs * total - len(self.skipped)
        assert Counter(names(lineage, 0, places)) == +left
        assert names(lineage, places, 1)[0][0] == epochs
        gone = [lineage.epoch(place) for place in [*range(0, places, 7), places]]
        assert gone == sorted(gone)
        assert gone[-1] == epochs


def random_skip(draw, place, reached, total):
    """None, or places around those that were read, at times more than an epoch of them."""
    kind = draw.randrange(4)
    if kind == 0:
        return None
    first = draw.randrange(max(0, place - 3), reached + 3)
    return first, first + draw.randrange([2, total + 1, 3 * total + 2][kind - 1])


@pytest.mark.parametrize("number", range(200))
def test_every_block_is_used_once_an_epoch_but_for_declared_skips(number):
    """Law 3, whatever the history: walked as a run does, checked against a list of what it read."""
    draw = random.Random(number)
    total = draw.randrange(1, 61)
    walk = Walk(total, draw.randrange(10))
    for seed in range(100, 100 + draw.randrange(1, 6)):
        walk.read(draw, draw.randrange(2 * total + 1))
        reached = len(walk.consumed)
        place = draw.choice([0, reached, draw.randrange(reached + 1), reached // total * total])
        walk.roll_back(place, seed, random_skip(draw, place, reached, total))
        walk.check()
    walk.read(draw, draw.randrange(total + 1))
    walk.check()


def test_what_one_rollback_declared_skipped_stays_so_when_a_later_one_goes_further_back():
    first = start(50).rolled_back(20, 2, (25, 35))
    declared = skipped_names(first)
    assert declared == sorted(names(start(50), 25, 10))
    further = first.rolled_back(10, 3, (12, 14))
    assert [segment.first_position for segment in further.segments] == [0, 10]
    assert skipped_names(further) == sorted(declared + names(first, 12, 2))
    assert not set(names(further, 0, 38)) & set(skipped_names(further))
    assert names(further, 38, 1)[0][0] == 1


def test_a_skip_begins_no_earlier_than_the_rollback():
    lineage = start(50).rolled_back(20, 2, (5, 22))
    assert skipped_names(lineage) == sorted(names(start(50), 20, 2))
    assert start(50).rolled_back(20, 2, (5, 20)) == start(50).rolled_back(20, 2)


def test_whole_epochs_may_be_skipped():
    lineage = start(5).rolled_back(3, 2, (3, 15))
    assert [epoch for epoch, _ in names(lineage, 0, 8)] == [0, 0, 0, 3, 3, 3, 3, 3]
    again = lineage.rolled_back(3, 3)
    assert [epoch for epoch, _ in names(again, 0, 8)] == [0, 0, 0, 3, 3, 3, 3, 3]
    assert again.epoch(3) == 3
    assert start(5).rolled_back(0, 2, (0, 12)).epoch(3) == 3


def test_a_skipped_block_counts_as_read_from_its_declaration_on_in_its_epoch():
    here = start(50).rolled_back(20, 2, (25, 35))
    assert [50 * here.epoch(place) for place in (19, 20, 39, 40, 41)] == [19, 30, 49, 50, 51]
    later = start(50).rolled_back(20, 2, (60, 70))
    assert [50 * later.epoch(place) for place in (20, 49, 50, 89, 90)] == [20, 49, 60, 99, 100]


def test_a_rollback_changes_what_is_left_and_nothing_before_it():
    before, _ = start(1000).blocks(0, 1000)
    after, _ = start(1000).rolled_back(600, 2).blocks(0, 1000)
    assert np.array_equal(before[:600], after[:600])
    assert (before[600:] == after[600:]).mean() < 0.02
    assert set(before[600:]) == set(after[600:])


def test_a_rollback_past_an_earlier_one_forgets_its_seed():
    lineage = start(100).rolled_back(50, 2).rolled_back(80, 3).rolled_back(30, 4)
    assert lineage == Lineage(100, (Segment(0, 1), Segment(30, 4)))
    again = start(100).rolled_back(50, 2).rolled_back(50, 3)
    assert again == Lineage(100, (Segment(0, 1), Segment(50, 3)))
    assert start(100).rolled_back(0, 3) == start(100, 3)


def test_the_seed_in_force_is_the_newest_segment_s():
    lineage = start(40).rolled_back(30, 4).rolled_back(50, 5)
    assert [lineage.seed_at(place) for place in (0, 29, 30, 49, 50, 10**9)] == [1, 1, 4, 4, 5, 5]


@pytest.mark.parametrize("segments", [(), (Segment(1, 1),), (Segment(0, 1), Segment(0, 2))])
def test_a_lineage_that_would_repeat_blocks_is_an_error(segments):
    with pytest.raises(AssertionError):
        Lineage(10, segments)


def test_segments_are_told_apart_by_all_that_they_say():
    lineages = [
        start(50).rolled_back(20, 2),
        start(50).rolled_back(21, 2),
        start(50).rolled_back(20, 3),
        start(50).rolled_back(20, 2, (20, 25)),
        start(50).rolled_back(20, 2, (21, 26)),
    ]
    identities = [lineage.segments[-1].identity for lineage in lineages]
    assert len(set(identities)) == len(set(lineages)) == 5
    assert identities[3] == (20, 2, 5, identities[3][3])
    assert lineages[3] == start(50).rolled_back(20, 2, (20, 25))
    assert lineages[3].segments[-1] != identities[3]


def test_a_digest_tells_what_is_read_and_in_which_order():
    lineage = start(50).rolled_back(20, 2)
    assert lineage.digest(0, 20) == start(50).digest(0, 20)
    assert lineage.digest(0, 21) != start(50).digest(0, 21)
    assert start(50).digest(10, 7) == "d45a532118a6981c"
    epochs = {start(1).digest(place, 1) for place in range(3)}  # of the same block
    assert len(epochs) == 3


def test_a_lineage_pickles_small_and_comes_back():
    lineage = start(200_000_000).rolled_back(10**8, 2, (10**8, 10**8 + 1000)).rolled_back(10**8, 3)
    expected = names(lineage, 10**8 - 50, 100)
    sent = pickle.dumps(lineage)
    assert len(sent) < 1000 * 16 + 1000
    there = pickle.loads(sent)
    assert there == lineage
    assert names(there, 10**8 - 50, 100) == expected


def test_seeking_in_two_hundred_million_blocks_touches_a_few_places(monkeypatch):
    """However large the corpus and however far in: arrays are as long as the request."""
    total = 200_000_000
    touched = []
    mix = permutation._mix

    def counting(x, key):
        touched.append(x.size)
        return mix(x, key)

    monkeypatch.setattr(permutation, "_mix", counting)
    lineage = start(total).rolled_back(3 * total // 2, 2)
    blocks, epochs = lineage.blocks(2 * total - 300, 512)
    assert len(np.unique(blocks[:300])) == 300
    assert (epochs[:300] == 1).all()
    assert (epochs[300:] == 2).all()
    assert blocks.max() < total
    assert max(touched) <= 512
    # at most four turns a place and permutation on average, three permutations here at most
    assert sum(touched) <= 512 * 6 * 4 * 3
