"""Validation perplexity of a model folder, at the training length and beyond it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from data_prep.corpus import Corpus
from pretrain.batches import Blocks, MicroBatch, validation_batches
from pretrain.config import MaskingConfig
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.masked import MaskedLM


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What one pass over the validation split measured."""

    length: int
    loss: float
    """Nats a masked token."""
    perplexity: float
    masked_tokens: int
    blocks: int


def evaluate_lengths(
    model: LanguageModel,
    tokenizer_digest: str,
    folder: Path,
    lengths: Sequence[int],
    micro_batch_size: int = 8,
    limit: int = 0,
) -> list[Evaluation]:
    """Perplexity on a corpus's validation split cut into blocks of each length.

    15 % of the tokens are masked, always the same ones.

    Args:
        model: any device, evaluation mode.
        tokenizer_digest: of the model's vocabulary.
        folder: a corpus folder.
        lengths: tokens of a block, `<s>` included.
        micro_batch_size: blocks a forward pass.
        limit: blocks at most; 0: all.

    Raises:
        ValueError: another vocabulary, no validation split, or a length that the model cannot read.
    """
    corpus = Corpus(folder, "valid")
    if corpus.manifest.tokenizer_digest != tokenizer_digest:
        raise ValueError(
            f"{folder}: was made with another vocabulary ({corpus.manifest.tokenizer_digest[:12]}, "
            f"{corpus.manifest.vocab_size} ids) than the model's ({tokenizer_digest[:12]})"
        )
    objective = MaskedLM(MaskingConfig(), corpus.manifest.vocab_size - 1, model.config.vocab_size)
    results = []
    for length in lengths:
        blocks = Blocks(corpus, length)
        batches = validation_batches(blocks, objective, limit, micro_batch_size, 0, 1)
        loss, targets = summed_loss(model, objective, batches)
        mean = loss / targets
        results.append(
            Evaluation(
                length, mean, math.exp(mean), targets, min(limit or len(blocks), len(blocks))
            )
        )
    return results


def summed_loss(
    model: LanguageModel, objective: MaskedLM, batches: Sequence[MicroBatch]
) -> tuple[float, int]:
    """Loss in nats and number of masked tokens, summed over the batches."""
    device = next(model.parameters()).device
    loss, targets = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            tensors = {k: torch.from_numpy(v).to(device) for k, v in batch.arrays.items()}
            loss += float(objective.loss(model, tensors))
            targets += batch.targets
    return loss, targets
