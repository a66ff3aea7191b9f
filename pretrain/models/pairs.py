"""Validation on both tasks of pairs of segments (Lan et al. 2020, table 5)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pretrain.data.sources import Source
from pretrain.model.language_model import LanguageModel
from pretrain.models.evaluate import Evaluation, evaluate_blocks
from pretrain.objectives.base import PretrainingObjective
from pretrain.objectives.sentence_pairs import SentencePairsLM


def pair_objectives(objective: PretrainingObjective) -> dict[str, SentencePairsLM]:
    """The objective that each score is measured with, by the score's name; none without pairs."""
    if not isinstance(objective, SentencePairsLM):
        return {}
    tasks: dict[str, Literal["none", "nsp", "sop"]]
    tasks = {"masked": "none", "nsp": "nsp", "sop": "sop"}
    return {
        name: dataclasses.replace(
            objective, settings=dataclasses.replace(objective.settings, pair_task=task)
        )
        for name, task in tasks.items()
    }


def evaluate_pairs(
    model: LanguageModel,
    objective: PretrainingObjective,
    source: Source,
    limit: int = 0,
    micro_batch_size: int = 8,
) -> Evaluation:
    """Scores as a run measures them, and those of the pair head on both tasks.

    Both tasks read one pair of each block. The score of the masked tokens is that of pairs in their
    order, so that models of different tasks predict the same tokens of the same text.

    Args:
        model: any device, evaluation mode, with a pair head, which need not be trained.
        objective: for validation, with the model's own task.
        source: blocks of sentences of the validation split.
        limit: most blocks; 0: all.
        micro_batch_size: blocks per forward pass.

    Raises:
        ValueError: nothing to predict, or a length that the model cannot read.
    """
    own = evaluate_blocks(model, objective, source, limit, micro_batch_size)
    pairs = {}
    for name, each in pair_objectives(objective).items():
        found = own
        if each.settings != objective.settings:
            found = evaluate_blocks(model, each, source, limit, micro_batch_size)
        pairs[name] = found.terms.get(name, found.total)
    return dataclasses.replace(own, pairs=pairs)
