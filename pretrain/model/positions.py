"""Where a token stands: added embeddings (learned, sinusoidal) and attention bias (ALiBi)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# The first token has row 2, as in fairseq (`padding_idx + 1`): rows 0 and 1 are never read. Kept,
# so that published weights fit unchanged.
FIRST_POSITION = 2


class LearnedPositions(nn.Module):
    """One trained vector a position; inputs longer than the table are refused."""

    def __init__(self, max_positions: int, hidden_size: int) -> None:
        """A table for `max_positions` tokens."""
        super().__init__()
        self.max_positions = max_positions
        self.table = nn.Embedding(max_positions + FIRST_POSITION, hidden_size)

    def forward(self, places: Tensor) -> Tensor:
        """Vectors of places counted from 0: [T] to [T, D], or [B, T] to [B, T, D].

        Raises:
            ValueError: the input is longer than the table.
        """
        length = places.shape[-1]
        if length > self.max_positions:
            raise ValueError(
                f"input of {length} tokens: learned positions end at {self.max_positions} "
                "(a model with ALiBi or sinusoidal positions reads longer ones)"
            )
        vectors: Tensor = self.table(places + FIRST_POSITION)
        return vectors


class SinusoidalPositions(nn.Module):
    """Fixed sines and cosines, in halves rather than interleaved (fairseq's layout)."""

    def __init__(self, hidden_size: int) -> None:
        """No parameters: the table is computed for the length at hand."""
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, places: Tensor) -> Tensor:
        """Vectors of places counted from 0: [T] to [T, D], or [B, T] to [B, T, D]; always fp32."""
        half = self.hidden_size // 2
        steps = torch.arange(half, device=places.device)
        frequency = torch.exp(steps * -(math.log(10000.0) / (half - 1)))
        angles = (places + FIRST_POSITION).float()[..., None] * frequency  # [..., T, D/2]
        return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)


def places_of(document_ids: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Where each token stands in its text, counted from 0.

    Args:
        document_ids: [B, T]; where it numbers the texts of a row, each is counted by itself.
        length: T.
        device: of the answer.

    Returns:
        [T] where every row is one text, else [B, T].
    """
    places = torch.arange(length, device=device)
    if document_ids is None or document_ids.dtype == torch.bool:
        return places
    begins = torch.zeros_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return places - first


def alibi_slopes(num_heads: int) -> list[float]:
    """Slope of each head: a geometric series from 2^(-8/n) (Press et al. 2022, section 3).

    Where the number of heads is no power of two: the series of the next smaller power, then every
    second slope of the next larger (the paper's code).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    if power < num_heads:
        slopes += alibi_slopes(2 * power)[0::2][: num_heads - power]
    return slopes


def alibi_bias(num_heads: int, length: int, kind: str, device: torch.device) -> Tensor:
    """Bias on attention scores, [H, T, T], always fp32: -slope * distance.

    "symmetric" counts |i - j|; "offset" makes keys to the right half a step nearer, so that +n and
    -n differ: row 0 is 0 -.5 -1.5 -2.5, row 1 is -1 0 -.5 -1.5, in units of the slope
    (EIFY/fairseq, utils.alibi).
    """
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)
    places = torch.arange(length, dtype=torch.float32, device=device)
    ahead = places[None, :] - places[:, None]  # [T, T], key minus query
    distance = ahead.abs()
    if kind == "offset":
        distance = distance - 0.5 * (ahead > 0)
    return -slopes[:, None, None] * distance
