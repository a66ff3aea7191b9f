"""The block order: a permutation that needs no memory, and its history of reseeds."""

import random

import numpy as np
import pytest

from pretrain import order
from pretrain.order import Lineage, Segment, permute

SIZES = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4096, 4097, 10007]


def start(seed=1):
    return Lineage((Segment(0, seed),))


def all_of(total):
    return np.arange(total, dtype=np.int64)


@pytest.mark.parametrize("total", SIZES)
def test_every_number_appears_once_whatever_the_size_seed_and_epoch(total):
    for seed, epoch in [(0, 0), (1, 0), (1, 1), (-7, 3), (2**63, 0)]:
        image = permute(all_of(total), total, seed, epoch)
        assert np.array_equal(np.sort(image), all_of(total))


def test_other_seeds_and_epochs_give_other_orders():
    orders = [
        tuple(permute(all_of(50), 50, seed, epoch)) for seed in (-1, 0, 1, 2) for epoch in (0, 1, 2)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(50)) not in orders


def test_the_order_looks_random():
    """Correlation with the identity, fixed points and neighbours, beside what chance gives."""
    total = 10007
    image = permute(all_of(total), total, 1, 0)
    assert abs(np.corrcoef(all_of(total), image)[0, 1]) < 5 / total**0.5
    assert (image == all_of(total)).sum() < 10
    assert (np.abs(np.diff(image)) == 1).sum() < 15
    firsts = [int(permute(np.array([0]), 8, seed, 0)[0]) for seed in range(4000)]
    assert np.bincount(firsts, minlength=8).min() > 400


def test_any_stretch_is_a_slice_of_the_whole_epochs_included():
    lineage = start().reseeded(30, 2).reseeded(140, 9)
    blocks, epochs = lineage.blocks(0, 500, 97)
    for first, count in [(0, 1), (13, 50), (90, 20), (97, 97), (123, 377), (499, 1), (250, 0)]:
        some, of_epochs = lineage.blocks(first, count, 97)
        assert np.array_equal(some, blocks[first : first + count])
        assert np.array_equal(of_epochs, epochs[first : first + count])
    assert np.array_equal(epochs, np.arange(500) // 97)


def random_history(draw):
    """A lineage after some rollbacks, a total, and the last place that was reached."""
    total = draw.randrange(1, 120)
    lineage, reached, prefixes = start(draw.randrange(10)), 0, []
    for seed in range(100, 100 + draw.randrange(6)):
        reached += draw.randrange(1, 2 * total + 1)
        place = draw.randrange(reached + 1)
        before = lineage.blocks(0, place, total)[0]
        lineage = lineage.reseeded(place, seed)
        prefixes.append((place, before))
        reached = place
    return lineage, total, prefixes


@pytest.mark.parametrize("number", range(300))
def test_every_block_is_used_once_an_epoch_whatever_the_history(number):
    """Law 3."""
    lineage, total, _ = random_history(random.Random(number))
    for epoch in range(4):
        blocks, epochs = lineage.blocks(epoch * total, total, total)
        assert np.array_equal(np.sort(blocks), all_of(total))
        assert set(epochs.tolist()) == {epoch}


@pytest.mark.parametrize("number", range(100))
def test_a_reseed_leaves_what_was_consumed_as_it_was(number):
    lineage, total, prefixes = random_history(random.Random(number))
    for index, (place, before) in enumerate(prefixes):
        # Rollbacks to an earlier place, later on, may change what follows that place.
        untouched = min([place, *(later for later, _ in prefixes[index + 1 :])])
        now = lineage.blocks(0, untouched, total)[0]
        assert np.array_equal(now, before[:untouched])


def test_a_reseed_changes_what_is_left():
    before, _ = start().blocks(0, 1000, 1000)
    after, _ = start().reseeded(600, 2).blocks(0, 1000, 1000)
    assert np.array_equal(before[:600], after[:600])
    assert (before[600:] == after[600:]).mean() < 0.02
    assert set(before[600:]) == set(after[600:])


def test_a_rollback_past_an_earlier_reseed_forgets_it():
    lineage = start().reseeded(50, 2).reseeded(80, 3).reseeded(30, 4)
    assert lineage == Lineage((Segment(0, 1), Segment(30, 4)))
    assert start().reseeded(50, 2).reseeded(50, 3) == Lineage((Segment(0, 1), Segment(50, 3)))
    assert start().reseeded(0, 3) == start(3)


def test_the_seed_in_force_is_the_newest_segment_s():
    lineage = start().reseeded(30, 4).reseeded(50, 5)
    assert [lineage.seed_at(place) for place in (0, 29, 30, 49, 50, 10**9)] == [1, 1, 4, 4, 5, 5]


@pytest.mark.parametrize("segments", [(), (Segment(1, 1),), (Segment(0, 1), Segment(0, 2))])
def test_a_lineage_that_would_repeat_blocks_is_an_error(segments):
    with pytest.raises(AssertionError):
        Lineage(segments)


def test_seeking_in_two_hundred_million_blocks_touches_a_few_places(monkeypatch):
    """However large the corpus and however far in: arrays are as long as the request."""
    total = 200_000_000
    touched = []
    mix = order._mix

    def counting(x, key):
        touched.append(x.size)
        return mix(x, key)

    monkeypatch.setattr(order, "_mix", counting)
    lineage = start().reseeded(3 * total // 2, 2)
    blocks, epochs = lineage.blocks(2 * total - 300, 512, total)
    assert len(np.unique(blocks[:300])) == 300
    assert (epochs[:300] == 1).all()
    assert (epochs[300:] == 2).all()
    assert blocks.max() < total
    assert max(touched) <= 512
    # at most four turns a place and permutation on average, three permutations here at most
    assert sum(touched) <= 512 * 6 * 4 * 3
