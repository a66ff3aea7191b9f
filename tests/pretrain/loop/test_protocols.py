"""What a micro-batch gives to the model, and how terms make a loss."""

import numpy as np
import pytest
import torch

from pretrain.loop.protocols import MicroBatch, TermLoss, weighted_loss


@pytest.mark.parametrize(
    ("ids", "is_given"),
    [
        ([[True, True], [True, True]], False),
        ([[True, True], [True, False]], True),
        ([[1, 1], [1, 1]], True),
        ([[1, 1], [2, 2]], True),
    ],
)
def test_ids_of_rows_without_padding_are_not_given_to_the_model(ids, is_given):
    """Integers may number several documents. On a CPU nothing is copied."""
    arrays = {"input_ids": np.ones((2, 2)), "document_ids": np.array(ids)}
    tensors = MicroBatch(0, arrays, 4, (1,)).to(torch.device("cpu"))
    assert ("document_ids" in tensors) == is_given
    assert tensors["input_ids"].data_ptr() == arrays["input_ids"].ctypes.data
    assert "document_ids" in arrays


def test_the_loss_weighs_each_term_and_leaves_out_terms_without_targets():
    terms = {"masked": TermLoss(2.0, 10), "order": TermLoss(0.5, 4), "unused": TermLoss(None, 0)}
    assert weighted_loss({"masked": 1.0, "order": 3.0, "unused": 9.0}, terms) == 3.5
