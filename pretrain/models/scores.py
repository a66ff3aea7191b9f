"""Scores of a model on a corpus: losses, perplexities, accuracies and intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

_FEWEST_TARGETS = 100
"""Groups of positions with fewer are too noisy for the table and the picture."""
_RESAMPLES = 1000
INTERVAL = "95 % interval of perplexity: bootstrap over documents"
"""What `Evaluation.interval` is."""


@dataclasses.dataclass(frozen=True)
class Score:
    """Loss over some targets."""

    loss: float
    """Nats per target; of several terms, their weighted sum."""
    perplexity: float
    """exp(loss); of several terms, that of the first one, which is of tokens. NaN without any."""
    targets: int
    accuracy: float
    """Share of the targets that the model finds most likely."""

    @property
    def accuracy_error(self) -> float:
        """Standard error of the accuracy p of n targets, sqrt(p (1 - p) / n)."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.targets)

    @classmethod
    def of(cls, sums: npt.NDArray[np.float64], weights: Sequence[float]) -> Score:
        """The score of summed losses.

        Args:
            sums: [terms, 3]: nats, correct predictions, targets; at least one target.
            weights: of the terms.
        """
        loss = sum(
            weight * nats / targets
            for weight, (nats, _, targets) in zip(weights, sums.tolist(), strict=True)
            if targets
        )
        (nats, _, tokens), *_ = sums.tolist()
        _, correct, targets = sums.sum(axis=0).tolist()
        # exp of more is infinite.
        perplexity = math.exp(min(nats / tokens, 700.0)) if tokens else math.nan
        return cls(loss, perplexity, int(targets), correct / targets)


@dataclasses.dataclass(frozen=True)
class Scores:
    """One pass over the validation split."""

    total: Score
    subsets: dict[str, Score]
    """By Pile subset, those with targets alone."""
    terms: dict[str, Score]
    """By term of the objective, where it has several, those with targets alone."""

    @classmethod
    def of(cls, sums: npt.ArrayLike, terms: Mapping[str, float], names: Sequence[str]) -> Scores:
        """The scores of `PretrainingObjective.evaluate`'s sums over all batches.

        Args:
            sums: [subsets, terms, 3], or flat.
            terms: of the objective.
            names: of the subsets.
        """
        parts = np.asarray(sums, dtype=np.float64).reshape(len(names), len(terms), 3)
        weights, whole = list(terms.values()), parts.sum(axis=0)
        subsets = zip(names, parts, strict=True)
        by_term = zip(terms, whole, strict=True) if len(terms) > 1 else ()
        return cls(
            Score.of(whole, weights),
            {name: Score.of(part, weights) for name, part in subsets if part[:, 2].any()},
            {name: Score.of(part[None], [1.0]) for name, part in by_term if part[2]},
        )


def scores_by_corpus(
    sums: npt.ArrayLike, terms: Mapping[str, float], subsets: Mapping[str, int]
) -> dict[str, Score]:
    """The scores of each of several corpora, those with targets alone.

    Args:
        sums: [subsets of all corpora, terms, 3], or flat.
        terms: of the objective.
        subsets: number of subsets of each corpus, by name.
    """
    parts = np.asarray(sums, dtype=np.float64).reshape(sum(subsets.values()), len(terms), 3)
    ends = np.cumsum(list(subsets.values()))[:-1]
    wholes = (part.sum(axis=0) for part in np.split(parts, ends))
    named = zip(subsets, wholes, strict=True)
    return {n: Score.of(whole, list(terms.values())) for n, whole in named if whole[:, 2].any()}


@dataclasses.dataclass(frozen=True)
class Evaluation(Scores):
    """Scores on blocks, or on windows of texts, of one length."""

    length: int
    """Most tokens of a block or window, with special tokens."""
    blocks: int
    """Number of blocks; of `evaluate_lengths`: of windows."""
    coverage: float
    """Share of the split's tokens that the blocks or windows hold. Span corruption reads less."""
    stride: int | None = None
    """Of windows that overlap."""
    positions: dict[int, Score] = dataclasses.field(default_factory=dict)
    """Of `evaluate_lengths`: by the number of tokens before the target in its window, from each of
    these numbers to below the next (`Windows.edges`); those with targets alone."""
    interval: tuple[float, float] | None = None
    """Of `evaluate_lengths`: see `perplexity_interval`."""
    interpolated: Score | None = None
    """With position interpolation."""
    interpolated_interval: tuple[float, float] | None = None
    pairs: dict[str, Score] = dataclasses.field(default_factory=dict)
    """Of `evaluate_blocks`, for a model with a pair head: of "masked", "nsp" and "sop"."""

    @property
    def perplexity_by_position(self) -> dict[int, float]:
        """Perplexity by the first position of a group, of groups with enough targets."""
        return {
            edge: score.perplexity
            for edge, score in self.positions.items()
            if score.targets >= _FEWEST_TARGETS
        }


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A length that could not be measured."""

    length: int
    refused: str
    """Why."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The results of one model."""

    model: str
    """Its name in tables, pictures and files."""
    trained_length: int
    """Tokens of the blocks of its training."""
    results: list[Evaluation | Refusal] = dataclasses.field(default_factory=list)
    pair_task: str | None = None
    """What its pair head was trained on, such as "sop"; "-" where nothing says; None without such a
    head."""

    @property
    def evaluations(self) -> list[Evaluation]:
        """The results without refusals, by length."""
        found = [result for result in self.results if isinstance(result, Evaluation)]
        return sorted(found, key=lambda each: each.length)


def perplexity_interval(sums: npt.NDArray[np.float64]) -> tuple[float, float] | None:
    """The 95 % interval of a perplexity by the bootstrap (Efron and Tibshirani 1993, chapter 13).

    The parts are drawn with replacement 1,000 times, always with the same seed. The interval is
    that of the text, as if other documents had been read; the model is the same.

    Args:
        sums: [parts, 3]: nats, correct predictions, targets of each part of the text.

    Returns:
        The 2.5th and the 97.5th percentile; None where fewer than two parts have targets.
    """
    sums = sums[sums[:, 2] > 0]
    if len(sums) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(sums), size=(_RESAMPLES, len(sums)))
    nats, _, targets = sums[drawn].sum(axis=1).T
    low, high = np.percentile(nats / targets, [2.5, 97.5])
    return math.exp(min(low, 700.0)), math.exp(min(high, 700.0))
