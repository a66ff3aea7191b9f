"""Attention with linear biases (Press et al. 2022), for causal models and for encoders."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .scores import ScoreFunction, constant

# Of a key that a head does not see: its weight is zero in any precision, and a query that sees no
# key at all still has a softmax.
_UNSEEN = -3e4


class Alibi(nn.Module):
    """Add -slope * distance to attention scores (Press et al. 2022, section 3).

    The distance is |i - j|. Encoders have several shapes (EIFY/fairseq, and issue 5 of
    ofirpress/attention_with_linear_biases). In a causal model the first two and the last are the
    same, and one-sided heads of the second half see no other token:

        symmetric     The same slope on both sides.
        offset        Half a step less for keys to the right, so that +n and -n differ: row 0 is
                      0 -.5 -1.5 -2.5, row 1 is -1 0 -.5 -1.5, in units of the slope.
        one-sided     The first half of the heads sees no key after the query, the second half none
                      before it. Both have the slopes of half as many heads.
        by-direction  Keys after the query have the slopes in reverse order of the heads.

    Trained slopes are sigmoids of parameters, so that they stay between 0 and 1. They begin at the
    fixed slopes; weight decay pulls them towards 1/2.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Compute one slope per head and direction; make parameters of them if they are trained."""
        super().__init__()
        heads = config.num_heads
        self.shape, self.num_heads = config.alibi, heads
        slopes = alibi_slopes(heads // 2) * 2 if self.shape == "one-sided" else alibi_slopes(heads)
        self.slopes = slopes + slopes[::-1] if self.shape == "by-direction" else slopes
        self.logits = None
        if config.alibi_slopes == "trained":
            self.logits = nn.Parameter(torch.logit(torch.tensor(self.slopes)))

    def forward(self, device: torch.device, exact: bool = True) -> ScoreFunction:
        """Return the bias as a function of index tensors on `device`.

        If it need not be `exact`, it may differ by a constant of each head, which softmax ignores:
        FlexAttention saves an addition for each score. In bf16 quarters would cost precision.
        """
        if self.logits is None:
            slopes = constant(tuple(self.slopes), device)
        else:
            slopes = self.logits.float().sigmoid()
        # For whole numbers d, |d - 1/4| - 1/4 is d - 1/2 right of the query and -d elsewhere.
        shift = 0.25 if self.shape == "offset" else 0.0
        level = shift if exact else 0.0
        heads = self.num_heads

        def same_slopes(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # What depends on the query alone is computed once a tile in FlexAttention's loop.
            distance = (key.to(torch.float32) - (query.to(torch.float32) + shift)).abs() - level
            return -slopes[head] * distance

        def by_direction(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            slope = torch.where(key > query, slopes[heads + head], slopes[head])
            return -slope * (key - query).to(torch.float32).abs()

        def one_sided(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            is_seen = torch.where(head < heads // 2, key <= query, key >= query)
            return torch.where(is_seen, same_slopes(head, query, key), _UNSEEN)

        return {"one-sided": one_sided, "by-direction": by_direction}.get(self.shape, same_slopes)


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head: a geometric series from 2^(-8/n) (Press et al., section 3).

    Where the number of heads is not a power of two: the series of the next smaller power, then
    every second slope of the next larger (the paper's code).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    if power < num_heads:
        slopes += alibi_slopes(2 * power)[0::2][: num_heads - power]
    return slopes
