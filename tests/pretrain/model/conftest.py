"""FlexAttention without a compiler, for every test of the model."""

import pytest
from torch._higher_order_ops.flex_attention import flex_attention as unfused
from torch.nn.attention import flex_attention as library

from pretrain.model import flex


def unfused_kernel(query, key, value, score_mod, block_mask, kernel_options):
    """FlexAttention as torch computes it without a compiler: gradients on a CPU as well."""
    block_mask = block_mask or library._create_empty_block_mask(query, key)
    score_mod = score_mod or library._identity
    scale = query.shape[-1] ** -0.5
    mask = block_mask.as_tuple()
    return unfused(query, key, value, score_mod, mask, scale, {})[0]


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(flex, "_kernel", lambda: unfused_kernel)
