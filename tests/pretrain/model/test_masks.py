"""Visibility rules, against loops."""

import itertools

import pytest
import torch

from pretrain.model.masks import same_document

DOCUMENTS = torch.tensor([[1, 1, 2, 2, 2, 0], [3, 1, 1, 3, 0, 0]])


def on_grid(function, rows, length):
    index = torch.arange(length)
    row = torch.arange(rows)[:, None, None, None]
    return function(row, torch.zeros(1, 1, 1, dtype=torch.int64), index[:, None], index)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_query_sees_the_keys_of_its_own_document_in_any_order_of_ids(dtype):
    visible = on_grid(same_document(DOCUMENTS.to(dtype)), 2, 6)
    assert visible.shape == (2, 1, 6, 6)
    for row, query, key in itertools.product(range(2), range(6), range(6)):
        expected = DOCUMENTS[row, query] == DOCUMENTS[row, key]
        assert visible[row, 0, query, key] == expected


def test_bool_ids_hide_padding_from_every_query_with_one_number_per_key():
    visible = on_grid(same_document(DOCUMENTS > 0), 2, 6)
    assert visible.shape == (2, 1, 1, 6)
    assert torch.equal(visible[:, 0, 0], DOCUMENTS > 0)
