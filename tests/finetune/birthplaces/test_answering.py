"""Greedy answers: where they end, and that they depend on their question alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from finetune.birthplaces import training
from finetune.birthplaces.rows import encode, read_rows
from pretrain.convert.model_folder import build

MASK, LAST = 99, 60


class Counter(torch.nn.Module):
    """Predicts the id after the last one read; `<mask>` after LAST."""

    def __init__(self, block, prefers_special=False):
        super().__init__()
        self.prefers_special = prefers_special
        self.config = SimpleNamespace(max_positions=block)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows_read = 0

    def forward(self, input_ids, document_ids, target_positions):
        assert input_ids.shape[1] <= self.config.max_positions
        last = input_ids.flatten()[target_positions]
        assert document_ids.flatten()[target_positions].all()
        self.rows_read += len(input_ids)
        wanted = torch.where(last == MASK, input_ids[:, 0], last) + 1
        logits = torch.nn.functional.one_hot(
            torch.where(wanted > LAST, MASK, wanted), MASK + 1
        ).float()
        logits[:, :4] += 2 * self.prefers_special
        return logits


def answers(model, *firsts):
    rows = [np.array([first, *[3] * (first % 3), MASK]) for first in firsts]
    return training.answers(model, rows, MASK)


def test_an_answer_ends_before_the_mask_and_rows_that_have_ended_are_not_read_again():
    model = Counter(block=128)
    assert answers(model, 58, 55, 60) == [[59, 60], [56, 57, 58, 59, 60], []]
    assert model.rows_read == 3 + 6 + 1


def test_an_answer_has_at_most_32_characters_and_ends_with_the_positions():
    model = Counter(block=128)
    assert answers(model, 4)[0] == list(range(5, 37))
    # `<s>`, `<mask>` and 8 ids are 10 tokens; one more is predicted and not read.
    assert answers(Counter(block=10), 6)[0] == list(range(7, 16))


def test_padding_and_other_special_ids_are_never_part_of_an_answer():
    assert answers(Counter(block=128, prefers_special=True), 58) == [[59, 60]]


@pytest.mark.parametrize("variant", ["vanilla", "perceiver"])
def test_answers_do_not_depend_on_the_other_questions(fresh, task, variant):
    options = fresh(variant)
    loaded = build(options.reading_params_path, training.read(options))
    questions = [row[:1] for row in read_rows(task.dev)]
    encoded = encode(questions, loaded.tokenizer, 64, task.dev)
    together = training.answers(loaded.model, encoded, loaded.tokenizer.mask_id)
    for row, answer in list(zip(encoded, together, strict=True))[:3]:
        assert training.answers(loaded.model, [row], loaded.tokenizer.mask_id) == [answer]
