"""Position methods: what acts on embeddings (learned, sinusoidal), and on scores (ALiBi).

`config.POSITION_METHODS` says which class acts where. A later class that acts on queries and keys
(rotary) is called like a class that acts on embeddings, and returns a Rotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import ModelConfig

ScoreFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Index tensors of heads, queries and keys to what is added to the scores, in fp32.

Written once for all back ends: `dense` evaluates it on a grid, FlexAttention compiles it."""

Rotation = Callable[[Tensor], Tensor]
"""Queries and keys [B, T, 2, H, K] to the same, each rotated by its position."""

# fairseq gives the first token row 2 (`padding_idx + 1`), so rows 0 and 1 are never read. Kept, so
# that published weights fit unchanged.
FIRST_POSITION = 2


def position_module(name: str | None, config: ModelConfig) -> nn.Module | None:
    """Build the class of this module that an entry of `config.POSITION_METHODS` names."""
    return None if name is None else globals()[name](config)


class LearnedPositions(nn.Module):
    """One trained vector per position; inputs longer than the table are refused."""

    def __init__(self, config: ModelConfig) -> None:
        """Make a table for `config.max_positions` tokens."""
        super().__init__()
        self.max_positions = config.max_positions
        self.table = nn.Embedding(config.max_positions + FIRST_POSITION, config.hidden_size)

    def forward(self, positions: Tensor) -> Tensor:
        """Map positions counted from 0 to vectors: [T] to [T, D], or [B, T] to [B, T, D].

        Raises:
            ValueError: the input is longer than the table.
        """
        length = positions.shape[-1]
        if length > self.max_positions:
            raise ValueError(
                f"input of {length} tokens: learned positions end at {self.max_positions} "
                "(a model with ALiBi or sinusoidal positions reads longer ones)"
            )
        vectors: Tensor = self.table(positions + FIRST_POSITION)
        return vectors


class SinusoidalPositions(nn.Module):
    """Fixed sines and cosines, in halves rather than interleaved (fairseq's layout)."""

    def __init__(self, config: ModelConfig) -> None:
        """Keep the size; there are no parameters, and the table is computed for each input."""
        super().__init__()
        self.hidden_size = config.hidden_size

    def forward(self, positions: Tensor) -> Tensor:
        """Map positions counted from 0 to fp32 vectors: [T] to [T, D], or [B, T] to [B, T, D]."""
        half = self.hidden_size // 2
        steps = torch.arange(half, device=positions.device)
        frequency = torch.exp(steps * -(math.log(10000.0) / (half - 1)))
        angles = (positions + FIRST_POSITION).float()[..., None] * frequency  # [..., T, D/2]
        return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)


class Alibi(nn.Module):
    """Add -slope * distance to attention scores (Press et al. 2022, section 3); no parameters.

    The distance of "symmetric" is |i - j|. That of "offset" is half a step less for keys to the
    right, so that +n and -n differ: row 0 is 0 -.5 -1.5 -2.5, row 1 is -1 0 -.5 -1.5, in units of
    the slope (EIFY/fairseq, utils.alibi).
    """

    def __init__(self, config: ModelConfig) -> None:
        """Compute one slope per head."""
        super().__init__()
        self.slopes = alibi_slopes(config.num_heads)
        # For whole numbers d, |d - 1/4| - 1/4 is d - 1/2 right of the query and -d elsewhere.
        self.shift = 0.25 if config.alibi == "offset" else 0.0

    def forward(self, device: torch.device) -> ScoreFunction:
        """Return the bias as a function of index tensors on `device`."""
        # Not a buffer: casting the module to bf16 would round it.
        slopes = torch.tensor(self.slopes, dtype=torch.float32, device=device)
        shift = self.shift

        def bias(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = ((key - query).to(torch.float32) - shift).abs() - shift
            return -slopes[head] * distance

        return bias


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


def token_positions(document_ids: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return the position of each token in its document, counted from 0.

    Args:
        document_ids: [B, T] or None, see the package's docstring.
        length: T.
        device: of the result.

    Returns:
        [T] where every row is one document, else [B, T].
    """
    positions = torch.arange(length, device=device)
    if document_ids is None or document_ids.dtype == torch.bool:
        return positions
    begins = torch.zeros_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    first = torch.where(begins, positions, 0).cummax(dim=1).values
    return positions - first
