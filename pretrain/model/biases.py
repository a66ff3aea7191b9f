"""Position methods that act on attention scores: ALiBi and T5's bias, as functions of indices."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import ModelConfig

ScoreFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Index tensors of heads, queries and keys to the bias of the scores, in fp32.

Written once for all back ends: `dense` evaluates it on a grid, FlexAttention compiles it."""

# Of a key that a head does not see: its weight is zero in any precision, and a query that sees no
# key at all still has a softmax.
_UNSEEN = -3e4
BUCKETS, MAX_DISTANCE = 32, 128  # of T5


def constant(numbers: tuple[float, ...] | tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor, which stays on its device: fp32, or int64 of whole numbers.

    A copy in every batch would make the host wait for the device. Not a buffer: casting the module
    to bf16 would round it.
    """
    make = _made if torch.compiler.is_compiling() else _kept
    return make(numbers, device)


def _made(numbers: tuple[float, ...] | tuple[int, ...], device: torch.device) -> Tensor:
    dtype = torch.float32 if isinstance(numbers[0], float) else torch.int64
    return torch.tensor(numbers, dtype=dtype, device=device)


@functools.cache
def _kept(numbers: tuple[float, ...] | tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # training may read what an evaluation made
        return _made(numbers, device)


class Alibi(nn.Module):
    """Attention with linear biases: add -slope * distance (Press et al. 2022, section 3).

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


class T5Bias(nn.Module):
    """The relative position bias of T5 (Raffel et al. 2020): a trained number per head and bucket.

    A bucket holds similar distances. All layers have the same numbers. Scores are divided by
    sqrt(K) all the same, as in Press et al. 2022; T5 itself does not.
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
