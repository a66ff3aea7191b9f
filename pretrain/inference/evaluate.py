"""Validation perplexity of a model folder, at the training length and beyond it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from data_prep.corpus import Corpus
from pretrain.data.batches import (
    Blocks,
    refuse_without_targets,
    validation_batches,
    validation_objective,
)
from pretrain.loop import MicroBatch
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.masked import MaskedLM


@dataclasses.dataclass(frozen=True)
class Score:
    """Loss over some masked tokens."""

    loss: float
    """Nats a masked token."""
    perplexity: float
    masked_tokens: int

    @classmethod
    def of(cls, loss_sum: float, masked_tokens: float) -> Score:
        """The score of a summed loss."""
        loss = loss_sum / masked_tokens
        # exp of more is infinite; a loss that high says all there is to say.
        return cls(loss, math.exp(min(loss, 700.0)), int(masked_tokens))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What one pass over the validation split measured."""

    length: int
    blocks: int
    total: Score
    subsets: dict[str, Score]
    """By Pile subset, those with masked tokens alone."""


def scores(sums: Sequence[Sequence[float]], names: Sequence[str]) -> tuple[Score, dict[str, Score]]:
    """The score over all, and by subset.

    Args:
        sums: [S][2], summed loss and masked tokens of each subset.
        names: of the S subsets.
    """
    total = Score.of(sum(loss for loss, _ in sums), sum(count for _, count in sums))
    parts = zip(names, sums, strict=True)
    return total, {name: Score.of(loss, count) for name, (loss, count) in parts if count}


def evaluate_lengths(
    model: LanguageModel,
    tokenizer_digest: str,
    folder: Path,
    lengths: Sequence[int],
    micro_batch_size: int = 8,
    limit: int = 0,
    packing: str = "complete",
) -> list[Evaluation]:
    """Perplexity on a corpus's validation split cut into blocks of each length.

    The masks are those of every validation (`batches.VALIDATION_MASKS`).

    Args:
        model: any device, evaluation mode.
        tokenizer_digest: of the model's vocabulary.
        folder: a corpus folder.
        lengths: tokens of a block, `<s>` included.
        micro_batch_size: blocks a forward pass.
        limit: blocks at most; 0: all.
        packing: how documents fill blocks (config.DataConfig); as the model was trained, else it
            meets what it has not seen.

    Raises:
        ValueError: another vocabulary, a validation split that is empty or has nothing to predict,
            or a length that the model cannot read.
    """
    corpus = Corpus(folder, "valid")
    if corpus.manifest.tokenizer_digest != tokenizer_digest:
        raise ValueError(
            f"{folder}: was made with another vocabulary ({corpus.manifest.tokenizer_digest[:12]}, "
            f"{corpus.manifest.vocab_size} ids) than the model's ({tokenizer_digest[:12]})"
        )
    objective = validation_objective(corpus.manifest.vocab_size, model.config.vocab_size)
    names = corpus.manifest.subsets
    results = []
    for length in lengths:
        blocks = Blocks(corpus, length, packing)
        refuse_without_targets(blocks, objective, limit)
        batches = validation_batches(blocks, objective, limit, micro_batch_size, 0, 1)
        sums = summed_losses(model, objective, batches, len(names))
        total, subsets = scores(sums.tolist(), names)
        results.append(Evaluation(length, min(limit or len(blocks), len(blocks)), total, subsets))
    return results


def summed_losses(
    model: LanguageModel, objective: MaskedLM, batches: Sequence[MicroBatch], subsets: int
) -> torch.Tensor:
    """Loss in nats and number of masked tokens, summed over the batches: [S, 2], by subset."""
    device = next(model.parameters()).device
    sums = torch.zeros((subsets, 2), dtype=torch.float64, device=device)
    with torch.no_grad():
        for batch in batches:
            tensors = {k: torch.from_numpy(v).to(device) for k, v in batch.arrays.items()}
            sums += objective.sums_by_subset(model, tensors, subsets)
    return sums
