"""The relative position bias of T5 (Raffel et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .scores import ScoreFunction, constant

BUCKETS, MAX_DISTANCE = 32, 128


class T5Bias(nn.Module):
    """A trained number per head and bucket of distances, the same in all layers.

    Scores are divided by sqrt(K) all the same, as in Press et al. 2022; T5 itself does not.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Make a table of 32 buckets."""
        super().__init__()
        self.table = nn.Embedding(BUCKETS, config.num_heads)
        distances = range(-MAX_DISTANCE, MAX_DISTANCE + 1)
        self.buckets = tuple(t5_bucket(distance, config.causal) for distance in distances)

    def forward(self, device: torch.device, exact: bool = True) -> ScoreFunction:
        """Return the bias as a function of index tensors on `device`; it is always exact."""
        # Looked up here, where ZeRO 3 has gathered the table.
        by_distance = self.table(constant(self.buckets, device)).float()

        def bias(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = (key - query).clamp(-MAX_DISTANCE, MAX_DISTANCE)
            return by_distance[distance + MAX_DISTANCE, head]

        return bias


def t5_bucket(distance: int, causal: bool) -> int:
    """Return the bucket of a key `distance` places after the query (before it: negative).

    Short distances have buckets of their own; longer ones share buckets that grow exponentially,
    and all from MAX_DISTANCE on share the last. A causal model has all 32 buckets for keys before
    the query; another model has 16 for each side.
    """
    buckets = BUCKETS if causal else BUCKETS // 2
    first = buckets if distance > 0 and not causal else 0
    distance = max(-distance, 0) if causal else abs(distance)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    # The first distance of each bucket is found in whole numbers: no rounding of a logarithm.
    ratio, steps = MAX_DISTANCE // exact, buckets - exact
    begun: list[bool] = [distance**steps >= exact**steps * ratio**step for step in range(1, steps)]
    return first + exact + sum(begun)
