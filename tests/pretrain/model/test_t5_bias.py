"""The relative position bias of T5."""

import pytest
import torch

from pretrain.model.config import ModelConfig
from pretrain.model.t5_bias import T5Bias, t5_bucket


@pytest.mark.parametrize("causal", [True, False])
def test_the_bias_is_the_entry_of_the_distance_s_bucket_at_any_length(causal):
    config = ModelConfig(50, hidden_size=24, num_heads=3, position="t5-bias", causal=causal)
    module = T5Bias(config)
    scores = module(torch.device("cpu"))
    head = torch.arange(3)
    for query, key in [(0, 0), (5, 2), (2, 5), (4000, 0), (0, 4000), (200, 72), (200, 73)]:
        row = module.table.weight[t5_bucket(key - query, causal)]
        assert torch.equal(scores(head, torch.tensor(query), torch.tensor(key)), row)
