"""What holds of every objective that predicts tokens of a block."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.objectives.base import Block, Vocabulary
from pretrain.objectives.causal import CausalLM, CausalLMConfig
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.objectives.spans import SpanCorruptionConfig, SpanCorruptionLM
from pretrain.objectives.tokens import FIRST_WORD_ID, IGNORED, PAD_ID

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
    row, column = divmod(arrays["target_positions"][used] + objective.places_before, 40)
    originals = [rows[r][c] for r, c in zip(row, column, strict=True)]
    assert arrays["labels"][used].tolist() == originals
    everything = np.zeros((3, 40), dtype=bool)
    everything[row, column] = True
    for row, ids in enumerate(rows):
        untouched = ~everything[row, : len(ids)]
        assert np.array_equal(arrays["input_ids"][row, : len(ids)][untouched], ids[untouched])


@every_objective
def test_the_loss_is_the_summed_cross_entropy_of_the_labels(objective):
    values = [[2.0, 0.0, -1.0], [0.5, 0.5, 0.5], [9.0, 9.0, 9.0]]
    logits = torch.tensor(values, dtype=torch.bfloat16, requires_grad=True)
    batch = {
        "input_ids": torch.zeros(1, 4, dtype=torch.int64),
        "document_ids": torch.ones(1, 4, dtype=torch.bool),
        "target_positions": torch.tensor([1, 3, 0]),
        "labels": torch.tensor([1, 2, IGNORED]),
    }
    seen = []

    def model(*arguments):
        seen.append(arguments)
        return logits

    loss = objective.loss(model, batch)
    by_hand = np.log(np.exp(2.0) + 1 + np.exp(-1.0)) - 0.0 + np.log(3.0)
    assert loss.dtype == torch.float32
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(by_hand, abs=1e-6)
    assert seen == [(batch["input_ids"], batch["document_ids"], batch["target_positions"])]


@pytest.mark.slow  # compiles C++
@every_objective
def test_the_compiled_loss_has_the_same_value_and_gradient(objective, run_ranks):
    labels = torch.tensor([1, 2, IGNORED, 69])
    batch = dict.fromkeys(("input_ids", "document_ids", "target_positions")) | {"labels": labels}

    def work():
        results = []
        for compiled in (False, True):
            padded = torch.randn(4, 80, generator=torch.Generator().manual_seed(0))
            padded = padded.bfloat16().requires_grad_()
            chosen = dataclasses.replace(objective, compiled=compiled)
            loss = chosen.loss(lambda *_, padded=padded: padded[:, :70], batch)
            loss.backward()
            results.append((loss.detach(), padded.grad))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)

    run_ranks(1, work)


@every_objective
def test_corrupted_labels_are_random_words_where_there_were_labels(objective):
    blocks = [Block(block(400, seed=1)), Block(block(250, seed=2))]
    arrays = objective.collate(blocks, [(1, 0, 0), (1, 0, 1)], 400)
    corrupted = objective.corrupted(arrays, np.random.default_rng(0))
    changed = corrupted["labels"] != arrays["labels"]
    used = arrays["labels"] != IGNORED
    assert not changed[~used].any()
    assert changed[used].mean() > 0.9
    assert ((corrupted["labels"][used] >= FIRST_WORD_ID) & (corrupted["labels"][used] < END)).all()
    assert objective.targets(corrupted) == objective.targets(arrays)


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
            if subsets[batch["target_positions"][number] + objective.places_before] == subset
        ]
        nats = sum(float(losses[number, batch["labels"][number]]) for number in mine)
        correct = sum(number % 2 == 0 for number in mine)
        assert sums[subset, 0].tolist() == pytest.approx([nats, correct, len(mine)], rel=1e-6)
    assert sums[..., 2].sum() == used.sum()


@every_objective
def test_the_number_of_targets_of_a_validation_depends_on_the_number_of_ids_alone(objective):
    vocabulary = Vocabulary(MASK_ID + 1, MASK_ID + 1, Path())
    validated = objective.settings.for_validation().build(vocabulary)
    for size in (2, 5, 23, 40):
        for key in ((0, 0, 1), (0, 0, 2)):
            found = [
                validated.collate([Block(block(size, seed=seed))], [key], 40) for seed in range(5)
            ]
            assert len({validated.targets(arrays) for arrays in found}) == 1
