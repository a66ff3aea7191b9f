"""The relative position bias of T5."""

import pytest
import torch

from pretrain.model.config import ModelConfig
from pretrain.model.t5_bias import T5Bias, t5_bucket

FIRST_CAUSAL = [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
FIRST_BOTH_WAYS = [*range(9), 12, 16, 23, 32, 46, 64, 91]


@pytest.mark.parametrize(
    ("causal", "sign", "first_distances", "offset"),
    [
        (True, -1, FIRST_CAUSAL, 0),
        (False, -1, FIRST_BOTH_WAYS, 0),
        (False, 1, FIRST_BOTH_WAYS, 16),
    ],
)
def test_buckets_begin_at_the_distances_of_t5(causal, sign, first_distances, offset):
    buckets = [t5_bucket(sign * distance, causal) - offset for distance in range(1, 1000)]
    expected = [
        sum(first <= distance for first in first_distances) - 1 for distance in range(1, 1000)
    ]
    assert buckets == expected
    assert buckets[-1] == len(first_distances) - 1


def test_a_causal_model_has_one_bucket_for_the_query_and_what_follows_it():
    assert {t5_bucket(distance, True) for distance in range(300)} == {0}
    assert t5_bucket(0, False) == 0


@pytest.mark.parametrize("causal", [True, False])
def test_the_bias_is_the_entry_of_the_distance_s_bucket_at_any_length(causal):
    config = ModelConfig(50, hidden_size=24, num_heads=3, position="t5-bias", causal=causal)
    module = T5Bias(config)
    scores = module(torch.device("cpu"))
    head = torch.arange(3)
    for query, key in [(0, 0), (5, 2), (2, 5), (4000, 0), (0, 4000), (200, 72), (200, 73)]:
        row = module.table.weight[t5_bucket(key - query, causal)]
        assert torch.equal(scores(head, torch.tensor(query), torch.tensor(key)), row)


@pytest.mark.parametrize("scale", [0.25, 128 / 136, 128 / 160])
def test_interpolated_t5_bias_depends_on_the_distance_alone(scale):
    """And on its nearest whole number: at small scales distance 1 is not distance 0."""
    torch.manual_seed(0)
    module = T5Bias(ModelConfig(50, hidden_size=32, num_heads=4, causal=True))
    cpu = torch.device("cpu")
    index, head = torch.arange(200), torch.arange(4)[:, None, None]
    bias = module(cpu, scale)(head, index[:, None], index)
    plain = module(cpu)(head, index[:, None], index)
    for distance in range(199):
        diagonal = bias.diagonal(-distance, dim1=1, dim2=2)
        assert (diagonal == diagonal[:, :1]).all()
        assert torch.equal(diagonal[:, 0], plain[:, round(distance * scale), 0])
