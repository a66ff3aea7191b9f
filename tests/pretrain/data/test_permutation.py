"""A permutation that needs no memory."""

import numpy as np
import pytest

from pretrain.data.permutation import permute

SIZES = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4096, 4097, 10007]


def all_of(total):
    return np.arange(total, dtype=np.int64)


@pytest.mark.parametrize("total", SIZES)
def test_every_number_appears_once_for_any_size_seed_and_epoch(total):
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
    """Correlation with the identity, fixed points and neighbours are near their expectation."""
    total = 10007
    image = permute(all_of(total), total, 1, 0)
    assert abs(np.corrcoef(all_of(total), image)[0, 1]) < 5 / total**0.5
    assert (image == all_of(total)).sum() < 10
    assert (np.abs(np.diff(image)) == 1).sum() < 15
    firsts = [int(permute(np.array([0]), 8, seed, 0)[0]) for seed in range(4000)]
    assert np.bincount(firsts, minlength=8).min() > 400
