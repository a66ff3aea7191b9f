"""The order in which a run reads the blocks of all its corpora.

A `Mixture` says from which corpus a place draws, and the corpus's `Lineage` which block a draw is.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pretrain.data.lineage import Lineage
from pretrain.data.mixture import Mixture
from pretrain.data.permutation import Indices


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of a run's blocks over all its corpora, after its rollbacks.

    Blocks are numbered through: those of the first corpus from 0 on, then those of the next.
    """

    mixture: Mixture
    lineages: tuple[Lineage, ...]
    """Of each corpus; their positions are its draws."""
    seeds: tuple[tuple[int, int], ...]
    """(first place, seed), ascending."""

    @classmethod
    def begin(cls, mixture: Mixture, totals: Sequence[int], seed: int) -> "Order":
        """The order of a run that was never rolled back.

        Args:
            mixture: of the corpora.
            totals: number of blocks of each corpus.
            seed: of the run.
        """
        return cls(mixture, (), ((0, seed),)).continued(mixture, totals, same=0, place=0)

    def rolled_back(self, place: int, seed: int, skip: tuple[int, int] | None = None) -> "Order":
        """The order that follows this one up to `place`, then continues with `seed`.

        Of each corpus, only the blocks that it has not drawn before `place` are permuted anew. What
        the mixture draws from which corpus stays.

        Args:
            place: blocks before it count as read.
            seed: permutes the other blocks of every corpus.
            skip: first and end place; the blocks that this order has there, from `place` on, will
                not be read in their epochs. See `Lineage.rolled_back`.
        """
        counts = self.mixture.counts
        skips: list[tuple[int, int] | None] = [None] * len(self.lineages)
        if skip:
            skips = list(zip(counts(skip[0]), counts(skip[1]), strict=True))
        parts = zip(self.lineages, counts(place), skips, strict=True)
        lineages = tuple(
            lineage.rolled_back(draw, _seed_of(seed, corpus), skipped)
            for corpus, (lineage, draw, skipped) in enumerate(parts)
        )
        kept = tuple((first, old) for first, old in self.seeds if first < place)
        return Order(self.mixture, lineages, (*kept, (place, seed)))

    def continued(self, mixture: Mixture, totals: Sequence[int], same: int, place: int) -> "Order":
        """The order with other weights from a place on, and with other corpora behind its first.

        Args:
            mixture: of all corpora; equal to this order's before the place.
            totals: number of blocks of each corpus.
            same: how many corpora are those of this order; before the place nothing is drawn from
                its others.
            place: blocks before it count as read. Rollbacks to later ones end.
        """
        before = tuple((first, seed) for first, seed in self.seeds if first <= place)
        seeds = (_seed_of(before[-1][1], corpus) for corpus in range(same, len(totals)))
        added = map(Lineage.begin, totals[same:], seeds)
        draws = self.mixture.counts(place)[:same]
        kept = [each.until(draw) for each, draw in zip(self.lineages, draws, strict=False)]
        return Order(mixture, (*kept, *added), before)

    def drawn_from(self, place: int) -> int:
        """How many corpora there are up to the last one that is drawn from before a place."""
        numbers = enumerate(self.mixture.counts(place), start=1)
        return max((number for number, count in numbers if count), default=0)

    def identity(self, end_place: int | None = None) -> list[Any]:
        """What the ledger and manifests of checkpoints have of an order, [reorderings, 4].

        Of several corpora it is a list of these. The last ones are left out if nothing was drawn
        from them, so that a corpus that is added later changes no record of what was read before.

        Args:
            end_place: leave out the reorderings that nothing before this place was drawn from.
        """
        ends = [None] * len(self.lineages) if end_place is None else self.mixture.counts(end_place)
        lineages = [
            [list(each) for each in lineage.identities if end is None or each[0] < end]
            for lineage, end in zip(self.lineages, ends, strict=True)
        ]
        while not lineages[-1]:
            lineages.pop()
        return lineages if len(lineages) > 1 else lineages[0]

    @cached_property
    def firsts(self) -> list[int]:
        """Number of each corpus's first block, and of all blocks."""
        return [0, *itertools.accumulate(lineage.total for lineage in self.lineages)]

    def seed_at(self, place: int) -> int:
        """The seed in force at a place."""
        return next(seed for first, seed in reversed(self.seeds) if first <= place)

    def epochs(self, place: int) -> list[float]:
        """Epochs of each corpus read before a place, as `Lineage.epoch` counts them."""
        draws = self.mixture.counts(place)
        return [lineage.epoch(draw) for lineage, draw in zip(self.lineages, draws, strict=True)]

    def epoch(self, place: int) -> float:
        """Epochs read before a place: the mean over all blocks of all corpora."""
        totals = (lineage.total for lineage in self.lineages)
        # Rounded to whole blocks, so that of one corpus the number stays as it is.
        read = (round(e * total) for e, total in zip(self.epochs(place), totals, strict=True))
        return sum(read) / self.firsts[-1]

    def blocks(self, first_place: int, count: int) -> tuple[Indices, Indices]:
        """Blocks at `count` places from `first_place` on, and the epoch of each in its corpus."""
        corpora, draws = self.mixture.draws(first_place, count)
        blocks, epochs = np.empty_like(draws), np.empty_like(draws)
        for corpus in np.unique(corpora).tolist():
            chosen = corpora == corpus
            own = draws[chosen]
            assert own[-1] - own[0] + 1 == len(own), "draws follow each other"
            found = self.lineages[corpus].blocks(int(own[0]), len(own))
            blocks[chosen], epochs[chosen] = found[0] + self.firsts[corpus], found[1]
        return blocks, epochs


def _seed_of(seed: int, corpus: int) -> int:
    """The seed of one corpus's order: the run's for the first; no two orders have the same."""
    if corpus == 0:
        return seed
    entropy = np.random.SeedSequence([abs(seed), int(seed < 0), corpus])
    return int(entropy.generate_state(1, np.uint64)[0])
