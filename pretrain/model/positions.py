"""Position methods that act on embeddings (learned, sinusoidal), or on queries and keys (rotary).

Those that act on attention scores are in biases.py. `config.POSITION_METHODS` says which class
acts where. All formulas are those of Press et al. 2022 and of the code they used.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .biases import Alibi, T5Bias  # noqa: F401 - named by POSITION_METHODS
from .config import ModelConfig

Rotation = Callable[[Tensor], Tensor]
"""Queries or keys, [B, T, H, K], to the same, each rotated by its position."""


class LearnedPositions(nn.Module):
    """One trained vector per position (`Embeddings` refuses longer inputs)."""

    def __init__(self, config: ModelConfig) -> None:
        """Make a table for `config.max_positions` tokens."""
        super().__init__()
        self.offset = config.position_offset
        self.table = nn.Embedding(config.max_positions + self.offset, config.token_size)

    def forward(self, positions: Tensor) -> Tensor:
        """Map positions counted from 0 to vectors: [T] to [T, E], or [B, T] to [B, T, E]."""
        return self.table(positions + self.offset)


class SinusoidalPositions(nn.Module):
    """Fixed sines and cosines, in halves rather than interleaved (fairseq's layout)."""

    def __init__(self, config: ModelConfig) -> None:
        """Keep the size; there are no parameters, and the table is computed for each input."""
        super().__init__()
        self.size, self.offset = config.token_size, config.position_offset

    def forward(self, positions: Tensor) -> Tensor:
        """Map positions counted from 0 to fp32 vectors: [T] to [T, E], or [B, T] to [B, T, E]."""
        half = self.size // 2
        steps = torch.arange(half, device=positions.device)
        frequency = torch.exp(steps * -(math.log(10000.0) / max(1, half - 1)))
        angles = (positions + self.offset).float()[..., None] * frequency  # [..., T, E/2]
        return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)


class Rotary(nn.Module):
    """Turn each pair of numbers (2i, 2i + 1) of a head by position x 10000^(-2i / K).

    Su et al. 2021, section 3.2.2: neighbouring numbers are a pair, as in Press et al. 2022.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Keep the size of a head; there are no parameters."""
        super().__init__()
        self.size = config.hidden_size // config.num_heads

    def forward(self, positions: Tensor) -> Rotation:
        """Return the rotation by positions [T] or [B, T]."""
        pairs = torch.arange(0, self.size, 2, device=positions.device)
        frequency = torch.exp(pairs * -(math.log(10000.0) / self.size))
        angles = (positions.float()[..., None] * frequency)[..., None, :, None]
        # Of each number of a pair, [..., T, 1, K/2, 2]: its factor, and that of the other number.
        own = angles.cos().expand(*angles.shape[:-1], 2)
        others = torch.cat([-angles.sin(), angles.sin()], dim=-1)

        def rotate(x: Tensor) -> Tensor:
            pair = x.float().view(*x.shape[:-1], -1, 2)
            turned = pair * own + pair.flip(-1) * others
            return turned.flatten(-2).to(x.dtype)

        return rotate


def token_positions(document_ids: Tensor | None, x: Tensor) -> Tensor:
    """Return the position of each token in its document, counted from 0.

    Args:
        document_ids: [B, T] or None, see the package's docstring.
        x: of any shape [B, T, ...].

    Returns:
        [T] where every row is one document, else [B, T].
    """
    positions = torch.arange(x.shape[1], device=x.device)
    if document_ids is None or document_ids.dtype == torch.bool:
        return positions
    begins = torch.zeros_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    first = torch.where(begins, positions, 0).cummax(dim=1).values
    return positions - first


def position_module(name: str | None, config: ModelConfig) -> nn.Module | None:
    """Build the class that an entry of `config.POSITION_METHODS` names, by its name here."""
    return None if name is None else globals()[name](config)
