"""Which corpus a place reads: in proportion to the weights, and each corpus without gaps."""

import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.lineage import Lineage
from pretrain.data.mixture import Mixture
from pretrain.data.order import Order
from tests.pretrain.builders import order_of

WEIGHTS = st.lists(st.integers(0, 50), min_size=5, max_size=5).filter(any)
STAGES = st.dictionaries(st.integers(1, 150), WEIGHTS, max_size=4).flatmap(
    lambda later: WEIGHTS.map(lambda first: sorted({0: first, **later}.items()))
)
"""Three weight changes or so of five corpora, by step."""


def mixture(stages):
    return Mixture.by_step(stages, lambda step: step)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(STAGES, st.integers(0, 150), st.integers(0, 50))
def test_each_corpus_is_drawn_from_without_gaps_in_proportion_to_its_weights(stages, first, count):
    made = mixture(stages)
    corpora, draws = made.draws(0, 200)
    counts, expected = [0] * 5, [Fraction(0)] * 5
    ends = [*(step for step, _ in made.stages[1:]), 200]
    bound = 0
    for (begin, weights), end in zip(made.stages, ends, strict=True):
        bound += 2 if np.count_nonzero(weights) > 2 else Fraction(1, 2)
        for place in range(begin, end):
            assert made.counts(place) == counts
            corpus = int(corpora[place])
            assert weights[corpus] > 0
            assert draws[place] == counts[corpus]
            counts[corpus] += 1
            expected = [
                e + Fraction(w, sum(weights)) for e, w in zip(expected, weights, strict=True)
            ]
            assert all(abs(c - e) <= bound for c, e in zip(counts, expected, strict=True))
    some = made.draws(first, count)
    assert np.array_equal(some[0], corpora[first : first + count])
    assert np.array_equal(some[1], draws[first : first + count])


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.integers(1, 2**25), min_size=1, max_size=30), st.integers(0, 2**50))
def test_it_is_exact_far_from_the_beginning(weights, place):
    made = mixture([(0, weights)])
    counts = made.counts(place)
    assert sum(counts) == place
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - Fraction(weight * place, sum(weights))) < 2
    corpora, draws = made.draws(place, 100)
    for corpus, draw in zip(corpora.tolist(), draws.tolist(), strict=True):
        assert draw == counts[corpus]
        counts[corpus] += 1
    assert counts == made.counts(place + 100)


def test_places_of_a_known_mixture_stay():
    """A run of this version is continued by later ones."""
    corpora, draws = mixture([(0, [3, 1, 2.5]), (10, [1, 1, 1])]).draws(0, 20)
    assert corpora.tolist() == [2, 0, 1, 0, 2, 0, 2, 0, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
    assert draws.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 1, 4, 5, 2, 5, 6, 3, 6, 7, 4]


def test_weights_count_as_they_are_written():
    made = mixture([(0, [0.1, 0.2]), (5, [10, 20.0]), (9, [1, 3])])
    assert made.stages == ((0, (1, 2)), (9, (1, 3)))
    assert made.shares(8) == [1 / 3, 2 / 3]
    assert made.shares(9) == [0.25, 0.75]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([(0, [1, 0]), (9, [0, 0])], "from step 9 on, the weights are 0, 0; accepted: .* above 0"),
        ([(0, [1, 0]), (9, [3, -1])], "from step 9 on, the weights are 3, -1"),
        ([(0, [float("inf"), 1])], "from step 0 on, the weights are inf, 1"),
        ([(0, [1 / 3, 1])], "0.3333333333333333, 1, .* no whole numbers"),
    ],
)
def test_weights_that_no_place_could_follow_are_refused(weights, words):
    with pytest.raises(ValueError, match=words):
        mixture(weights)


class Walk:
    """A run on an order: the names it read, in order, and those declared skipped."""

    def __init__(self, order, size):
        self.order, self.size = order, size
        self.read, self.skipped = [], []

    def step(self, world_size):
        """Read a global batch, divided over the ranks."""
        names = self.names(len(self.read), self.size)
        by_rank = [names[rank::world_size] for rank in range(world_size)]
        self.read += [by_rank[n % world_size][n // world_size] for n in range(self.size)]

    def roll_back(self, place, seed, skip):
        if skip:
            first = max(place, skip[0])
            self.skipped += self.names(first, max(0, skip[1] - first))
        self.order = self.order.rolled_back(place, seed, skip)
        del self.read[place:]

    def names(self, first, count):
        return list(zip(*map(np.ndarray.tolist, self.order.blocks(first, count)), strict=True))


@pytest.mark.parametrize("number", range(40))
def test_no_block_of_any_corpus_is_lost_or_repeated(number):
    """Law 3 for each corpus: weight changes, several world sizes, rollbacks, skips, at random."""
    draw = random.Random(number)
    totals = [draw.randrange(1, 40) for _ in range(3)]
    weights = [[draw.randrange(5) for _ in totals[1:]] + [1] for _ in range(4)]
    steps = [0, *sorted(draw.sample(range(1, 40), 3))]
    made = Mixture.by_step(list(zip(steps, weights, strict=True)), lambda step: 12 * step)
    walk = Walk(Order.begin(made, totals, 1), 12)
    for seed in range(2, 5):
        for _ in range(draw.randrange(12)):
            walk.step(draw.choice([1, 2, 3]))
        reached = len(walk.read) // 12
        target = draw.randrange(reached + 1)
        first = draw.randrange(target, reached + 1)
        skip = (
            (12 * first, 12 * draw.randrange(first, reached + 1)) if draw.random() < 0.6 else None
        )
        kept = walk.read[: 12 * target]
        walk.roll_back(12 * target, seed, skip)
        assert walk.read == kept == walk.names(0, len(kept))
    for _ in range(15):
        walk.step(draw.choice([1, 2]))
    place = len(walk.read)
    assert walk.names(0, place) == walk.read
    for corpus, (lineage, count) in enumerate(
        zip(walk.order.lineages, made.counts(place), strict=True)
    ):
        numbers = range(walk.order.firsts[corpus], walk.order.firsts[corpus + 1])
        seen = Counter((e, b) for b, e in walk.read if b in numbers)
        left_out = {(e, b) for b, e in walk.skipped if b in numbers}
        assert sum(seen.values()) == count
        assert set(seen.values()) <= {1}
        assert not left_out & set(seen)
        newest = max((epoch for epoch, _ in seen), default=0)
        whole = {(epoch, block) for epoch in range(newest) for block in numbers}
        assert whole <= set(seen) | left_out, "an epoch was left before it was read"
        assert lineage.total == len(numbers)


@pytest.mark.parametrize("number", range(10))
def test_a_mixture_of_one_is_the_corpus_alone(number):
    draw = random.Random(number)
    total = draw.randrange(1, 40)
    alone, order = Lineage.begin(total, 1), order_of(total)
    for seed in range(2, 5):
        place, first = draw.randrange(90), draw.randrange(90)
        skip = draw.choice([None, (first, first + draw.randrange(40))])
        alone, order = (each.rolled_back(place, seed, skip) for each in (alone, order))
    assert order.identity() == [list(each) for each in alone.identities]
    assert np.array_equal(order.blocks(3, 300), alone.blocks(3, 300))
    for place in range(200):
        begun = [s.seed for s in alone.reorderings if s.first_position <= place]
        assert order.seed_at(place) == begun[-1]
        assert order.epoch(place) == alone.epoch(place)


def test_corpora_of_the_same_size_have_different_orders():
    order = Order.begin(mixture([(0, [1, 1])]), [50, 50], 1)
    blocks, _ = order.blocks(0, 100)
    assert set(blocks.tolist()) == set(range(100))
    assert (blocks[blocks < 50]).tolist() != (blocks[blocks >= 50] - 50).tolist()
