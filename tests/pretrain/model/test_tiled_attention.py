"""Attention with dropout on a CPU, one tile at a time."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pretrain.model import tiled_attention as tiled
from tests.pretrain.model.test_attention import drawn


@pytest.mark.parametrize("length", [1, 7, 300, 700])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_tile_at_a_time_is_the_whole_at_once(length, with_bias):
    bias = drawn(1, 3, length, length, seed=2) if with_bias else None
    results = []
    for in_tiles in (False, True):
        qkv = drawn(2, length, 3, 3, 8).requires_grad_()
        if in_tiles:
            out = tiled.tiled_attention(qkv, () if bias is None else (bias,), 0.0)
        else:
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
            out = out.transpose(1, 2)
        out.backward(drawn(*out.shape, seed=1))
        results.append((out.detach(), qkv.grad))
    for whole, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-5)


def test_the_gradient_with_dropout_is_that_of_the_function(monkeypatch):
    monkeypatch.setattr(tiled, "_TILE", 15)  # several tiles, the last ones smaller
    bias = drawn(1, 3, 1, 5, dtype=torch.float64)

    def attend(qkv):
        torch.manual_seed(3)
        return tiled.tiled_attention(qkv, (bias,), 0.3)

    qkv = drawn(1, 5, 3, 3, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(attend, (qkv,))


def test_dropped_weights_are_as_many_as_asked_for_and_the_rest_is_scaled_to_match():
    length = 300
    qkv = torch.zeros(1, length, 3, 2, length)
    qkv[0, :, 2] = torch.eye(length)[:, None]  # values that show the weights
    torch.manual_seed(0)
    weights = tiled.tiled_attention(qkv, (), 0.1) * length
    dropped = weights == 0
    assert float(dropped.float().mean()) == pytest.approx(0.1, abs=5 * (0.09 / 180_000) ** 0.5)
    torch.testing.assert_close(weights[~dropped], torch.full_like(weights[~dropped], 1 / 0.9))
    for dim in (1, 3):  # no query and no key is favoured
        shares = dropped.float().mean(dim=dim)
        assert float(shares.std()) == pytest.approx((0.09 / length) ** 0.5, rel=0.2)


def test_dropout_follows_the_generator():
    qkv = drawn(1, 50, 3, 2, 8)

    def attend(seed):
        torch.manual_seed(seed)
        return tiled.tiled_attention(qkv, (), 0.5)

    assert torch.equal(attend(1), attend(1))
    assert not torch.equal(attend(1), attend(2))
