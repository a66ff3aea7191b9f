"""Validation of a model folder, at the training length and beyond it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from data_prep.corpus import Corpus
from pretrain.data.batches import refuse_without_targets, validation_batches
from pretrain.data.sources import SOURCES
from pretrain.loop import MicroBatch
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.base import ObjectiveSettings, PretrainingObjective, Vocabulary


@dataclasses.dataclass(frozen=True)
class Score:
    """Loss over some targets."""

    loss: float
    """Nats per target; of several terms, their weighted sum."""
    perplexity: float
    """exp(loss)."""
    targets: int
    accuracy: float
    """Share of the targets that the model finds most likely."""

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
        _, correct, targets = sums.sum(axis=0).tolist()
        # exp of more is infinite.
        return cls(loss, math.exp(min(loss, 700.0)), int(targets), correct / targets)


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


@dataclasses.dataclass(frozen=True)
class Evaluation(Scores):
    """Scores on blocks of one length."""

    length: int
    blocks: int


def evaluate_lengths(
    model: LanguageModel,
    tokenizer_digest: str,
    folder: Path,
    lengths: Sequence[int],
    settings: ObjectiveSettings,
    micro_batch_size: int = 8,
    limit: int = 0,
    packing: str = "complete",
) -> list[Evaluation]:
    """Scores on a corpus's validation split cut into blocks of each length.

    Args:
        model: any device, evaluation mode.
        tokenizer_digest: of the model's vocabulary.
        folder: a corpus folder.
        lengths: tokens of a block, special tokens included.
        settings: of the objective; its validation form is measured.
        micro_batch_size: blocks per forward pass.
        limit: most blocks; 0: all.
        packing: how the split is cut (`SOURCES`); best as the model was trained.

    Raises:
        ValueError: another vocabulary, a validation split that is empty or has nothing to predict,
            or a length that the model cannot read.
    """
    corpus = Corpus(folder, "valid")
    manifest = corpus.manifest
    if manifest.tokenizer_digest != tokenizer_digest:
        raise ValueError(
            f"{folder}: was made with another vocabulary ({manifest.tokenizer_digest[:12]}, "
            f"{manifest.vocab_size} ids) than the model's ({tokenizer_digest[:12]})"
        )
    vocabulary = Vocabulary(manifest.vocab_size, model.config.vocab_size, folder)
    objective = settings.for_validation().build(vocabulary)
    results = []
    for length in lengths:
        source = SOURCES[packing](corpus, length)
        refuse_without_targets(source, objective, limit)
        batches = validation_batches(source, objective, limit, micro_batch_size, 0, 1)
        sums = summed(model, objective, batches, len(manifest.subsets))
        scores = Scores.of(sums.tolist(), objective.terms, manifest.subsets)
        blocks = min(limit or len(source), len(source))
        results.append(Evaluation(**vars(scores), length=length, blocks=blocks))
    return results


def summed(
    model: LanguageModel,
    objective: PretrainingObjective,
    batches: Sequence[MicroBatch],
    subsets: int,
) -> torch.Tensor:
    """The objective's sums over the batches that have targets: [subsets, terms, 3] in fp64."""
    device = next(model.parameters()).device
    shape = (subsets, len(objective.terms), 3)
    sums = torch.zeros(shape, dtype=torch.float64, device=device)
    with torch.no_grad():
        for batch in batches:
            if any(batch.targets):
                sums += objective.evaluate(model, batch.to(device), subsets)
    return sums
