"""Which corpus each place of a run reads.

The places of a run count the blocks that it reads, from 0. `Mixture` gives each place a corpus and
the number of the draw from it, both computed from the weights alone: no state, no table, the same
for any number of ranks. Which block a draw is, `Order` says (order.py). A run of one corpus is a
mixture of one: place and draw are the same number.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np

from data_prep.common.files import named_errors
from pretrain.config.run import Segments
from pretrain.data.permutation import Indices

_LARGEST_SUM = 2**31
"""Of whole-number weights: below it, `_Node.drawn_left` is exact in 64 bits for any place."""


@dataclasses.dataclass(frozen=True, order=True)
class _Node:
    """A corpus, or two nodes between which draws alternate in proportion to their weights."""

    weight: int
    corpus: int
    """Its number; of a pair the lower one, which decides between equal weights."""
    parts: "tuple[_Node, _Node] | None" = None
    """The heavier node first; None for a corpus."""

    def drawn_left(self, counts: Indices) -> Indices:
        """How many of the node's first `counts` draws its first part has, [n] to [n].

        The whole number nearest to the part's share, a half rounded up. It grows by 0 or 1 with
        each draw, so both parts are drawn from in their own order without gaps.
        """
        assert self.parts
        share = self.parts[0].weight
        whole, rest = np.divmod(counts, self.weight)
        return whole * share + (2 * rest * share + self.weight) // (2 * self.weight)


def _tree(weights: Sequence[int]) -> _Node:
    """Pair the corpora with weight above 0, lightest first (Huffman 1952)."""
    heap = [_Node(weight, corpus) for corpus, weight in enumerate(weights) if weight]
    heapq.heapify(heap)
    while len(heap) > 1:
        light, heavy = heapq.heappop(heap), heapq.heappop(heap)
        first = min(light.corpus, heavy.corpus)
        heapq.heappush(heap, _Node(light.weight + heavy.weight, first, (heavy, light)))
    return heap[0]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Weights of corpora by place.

    From one change of the weights to the next, a corpus with the share w of the weights has w x p
    of the first p places, to less than 2 places; of two corpora, to half a place. (The count of a
    node is rounded once a level, by at most 1/2, and an error reaches a corpus in proportion to the
    weights. In a Huffman tree a node has at most half of the weight of its parent's parent, so the
    error is below 1/2 x (1 + 1 + 1/2 + 1/2 + 1/4 + ...) = 2.) A change keeps the counts.
    """

    stages: tuple[tuple[int, tuple[int, ...]], ...]
    """(first place, weight of each corpus), ascending; the first begins at place 0. Neighbours
    differ, and the weights of a stage have no common divisor."""

    @classmethod
    def by_step(
        cls, weights: Sequence[tuple[int, Sequence[float]]], first_block: Callable[[int], int]
    ) -> "Mixture":
        """The mixture of weights that change at steps.

        Args:
            weights: (first step, weight of each corpus), ascending, from step 0 on.
            first_block: returns the place of a step's first block.

        Raises:
            ValueError: no weight of a stage is above 0, one is below, or the ratios of the weights
                need too large whole numbers.
        """
        stages: list[tuple[int, tuple[int, ...]]] = []
        for step, of_corpora in weights:
            with named_errors(f"from step {step} on", ", "):
                whole = _whole_numbers(of_corpora)
            if not stages or stages[-1][1] != whole:
                stages.append((first_block(step), whole))
        return cls(tuple(stages))

    @classmethod
    def of_run(cls, segments: Segments) -> "Mixture":
        """Which of `segments.sources` each place of a run reads.

        Raises:
            ValueError: weights that no place could follow.
        """
        names = ", ".join(source.name for source in segments.sources)
        with named_errors(f"data.corpora ({names})"):
            return cls.by_step(segments.weights(), segments.sizes.first_block)

    def shares(self, place: int) -> list[float]:
        """Each corpus's share of the weights at a place."""
        weights = [weights for first, weights in self.stages if first <= place][-1]
        return [weight / sum(weights) for weight in weights]

    def counts(self, place: int) -> list[int]:
        """How many draws each corpus has before a place."""
        return self._counts(np.array([place]))[:, 0].tolist()

    def draws(self, first_place: int, count: int) -> tuple[Indices, Indices]:
        """The corpus at each of `count` places, and the number of its draw, from 0.

        Costs a few operations a place and corpus.
        """
        counts = self._counts(np.arange(first_place, first_place + count + 1))
        corpora = np.diff(counts).argmax(axis=0)
        return corpora, counts[corpora, np.arange(count)]

    def _counts(self, places: Indices) -> Indices:
        """How many draws each corpus has before each place, [corpora, n]."""
        counts = np.zeros((len(self.stages[0][1]), len(places)), dtype=np.int64)
        ends = [*(first for first, _ in self.stages[1:]), None]
        for (first, _), end, tree in zip(self.stages, ends, self._trees, strict=True):
            left = [(tree, places.clip(first, end) - first)]
            while left:
                node, draws = left.pop()
                if node.parts is None:
                    counts[node.corpus] += draws
                else:
                    of_first = node.drawn_left(draws)
                    left += zip(node.parts, (of_first, draws - of_first), strict=True)
        return counts

    @cached_property
    def _trees(self) -> list[_Node]:
        return [_tree(weights) for _, weights in self.stages]


def _whole_numbers(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratios of weights, which count as they are written.

    Raises:
        ValueError: none is above 0, one is below, or the numbers are too large.
    """
    listed = ", ".join(map(repr, weights))
    if not any(weights) or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"the weights are {listed}; accepted: numbers of 0 or more, one above 0")
    exact = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) >= _LARGEST_SUM:
        raise ValueError(
            f"the weights are {listed}, which are in the ratios of no whole numbers with "
            f"a sum below {_LARGEST_SUM:,}; write fewer digits"
        )
    return tuple(whole)
