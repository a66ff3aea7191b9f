"""What holds of every objective that predicts tokens of a block."""

import numpy as np
import pytest
import torch

from pretrain.objectives.base import Block
from pretrain.objectives.causal import CausalLM, CausalLMConfig
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.objectives.spans import SpanCorruptionConfig, SpanCorruptionLM
from pretrain.objectives.tokens import IGNORED, PAD_ID

MASK_ID, END = 999, 900
every_objective = pytest.mark.parametrize(
    "objective",
    [
        MaskedLM(MaskedLMConfig(), MASK_ID, END),
        CausalLM(CausalLMConfig(), END),
        SpanCorruptionLM(SpanCorruptionConfig(), MASK_ID, END),
    ],
    ids=lambda objective: objective.settings.name,
)


def block(length, seed=0):
    """`<s>` and words."""
    return np.append(0, np.random.default_rng(seed).integers(4, END, length - 1))


def laid_out(objective, read, key, length):
    """The block that the targets are tokens of."""
    return objective.rearranged(read, key, length) if hasattr(objective, "rearranged") else read


@every_objective
def test_collated_arrays_have_fixed_shapes_and_labels_where_tokens_are_predicted(objective):
    blocks = [Block(block(size, seed=size)) for size in (40, 5, 23)]
    keys = [(1, 0, n) for n in range(3)]
    arrays = objective.collate(blocks, keys, 40)
    rows = [laid_out(objective, *pair, 40).ids for pair in zip(blocks, keys, strict=True)]
    assert arrays["input_ids"].shape == arrays["document_ids"].shape == (3, 40)
    capacity = objective.capacity(40)
    assert arrays["target_positions"].shape == arrays["labels"].shape == (3 * capacity,)
    assert arrays["document_ids"].sum(axis=1).tolist() == [*map(len, rows)]
    assert (arrays["input_ids"][~arrays["document_ids"]] == PAD_ID).all()
    used = arrays["labels"] != IGNORED
    assert objective.targets(arrays) == (used.sum(),)
    assert (arrays["target_positions"][~used] == 0).all()
    row, column = divmod(arrays["target_positions"][used] + objective.settings.causal, 40)
    originals = [rows[r][c] for r, c in zip(row, column, strict=True)]
    assert arrays["labels"][used].tolist() == originals
    everything = np.zeros((3, 40), dtype=bool)
    everything[row, column] = True
    for row, ids in enumerate(rows):
        if objective.settings.causal:  # all but the first
            assert everything[row].tolist() == [0 < place < len(ids) for place in range(40)]
        untouched = ~everything[row, : len(ids)]
        assert np.array_equal(arrays["input_ids"][row, : len(ids)][untouched], ids[untouched])


@every_objective
def test_the_loss_is_the_model_s_of_the_labels(objective):
    names = "input_ids", "document_ids", "target_positions", "labels"
    batch = {name: torch.tensor(number) for number, name in enumerate(names)}

    def model(*arguments, labels):
        assert [*arguments, labels] == [*batch.values()]
        return torch.tensor(2.5)

    assert objective.loss(model, batch).tolist() == [2.5]


@every_objective
def test_an_evaluation_sums_by_the_subset_of_the_predicted_token(objective):
    read, key, length = Block(block(30), subsets=np.arange(30) // 7), (1, 0, 0), 32
    arrays = objective.collate([read], [key], length)
    subsets = laid_out(objective, read, key, length).subsets
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    used = batch["labels"] != IGNORED
    # The label of every second target is what the model finds most likely.
    likely = torch.where(torch.arange(len(used)) % 2 == 0, batch["labels"], 3).clamp(min=3)
    logits = torch.nn.functional.one_hot(likely, MASK_ID + 1).double()
    sums = objective.evaluate(lambda *_: logits, batch, 6)
    losses = -logits.log_softmax(dim=1)
    for subset in range(6):
        mine = [
            number
            for number in used.nonzero()[:, 0].tolist()
            if subsets[batch["target_positions"][number] + objective.settings.causal] == subset
        ]
        nats = sum(float(losses[number, batch["labels"][number]]) for number in mine)
        correct = sum(number % 2 == 0 for number in mine)
        assert sums[subset, 0].tolist() == pytest.approx([nats, correct, len(mine)], rel=1e-6)
    assert sums[..., 2].sum() == used.sum()
