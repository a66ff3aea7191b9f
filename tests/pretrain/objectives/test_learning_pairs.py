"""A small model learns both tasks of pairs, from text that holds their answers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.base import Block, Vocabulary
from pretrain.objectives.sentence_pairs import SentencePairsConfig

SENTENCES, WORDS, LENGTH, PAIRS = 6, 4, 32, 32
FIRST_ID = 4
SIZE = FIRST_ID + 2 * SENTENCES * WORDS + 1
PRE_NORM = {
    "layer_norm": "pre",
    "final_norm": True,
    "embedding_norm": False,
    "embedding_scale": "sqrt-hidden",
}
"""Learns much sooner than ALBERT's post-norm layers."""


def block(index, topic):
    """Six sentences; the words of each tell which of two topics it is about, and its place."""
    draw = np.random.default_rng(index)
    lengths = draw.integers(3, 6, SENTENCES)
    place = np.repeat(np.arange(SENTENCES), lengths)
    ids = FIRST_ID + (topic * SENTENCES + place) * WORDS + draw.integers(0, WORDS, len(place))
    subsets = np.zeros(len(ids), dtype=np.int64)
    return Block(ids, None, subsets, lengths, lambda share: block(index + 10_000, 1 - topic))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "steps"), [("sop", 30), ("nsp", 70)])
def test_a_small_model_learns_a_task_that_the_text_answers(task, steps):
    """Beside the masked tokens, and measured on pairs that it was not trained on.

    Next sentence takes longer: each segment by itself says nothing, only the two together do.
    """
    objective = SentencePairsConfig(pair_task=task).build(Vocabulary(SIZE, SIZE, Path()))

    def batch(number):
        indices = range(number * PAIRS, (number + 1) * PAIRS)
        blocks = [block(index, index % 2) for index in indices]
        arrays = objective.collate(blocks, [(1, 0, index) for index in indices], LENGTH)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return tensors, torch.tensor(objective.targets(arrays))

    torch.manual_seed(0)
    overrides = {"position": "alibi", "dropout": 0.0, "pair_head": True, **PRE_NORM}
    model = LanguageModel(presets.build("tiny", "albert", SIZE, overrides))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    weights = torch.tensor([*objective.terms.values()])
    for step in range(steps):
        read, targets = batch(step)
        (weights * objective.loss(model, read) / targets).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        sums = sum(objective.evaluate(model, batch(100 + n)[0], 1) for n in range(6))
    _, right, pairs = sums[0, 1].tolist()
    assert right / pairs > 0.85
