"""Token ids to the vectors that enter the first layer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .config import ModelConfig
from .positions import LearnedPositions, SinusoidalPositions, places_of

PAD_ID = 1


def smallest_length(dtype: torch.dtype) -> float:
    """Lower bound of a vector's length, so that a zero vector can be divided by it.

    1e-12 as in torch's `normalize`. fp16 rounds that to 0, and has its smallest normal number here.
    """
    return max(1e-12, torch.finfo(dtype).tiny)


class TokenEmbedding(nn.Embedding):
    """A table whose number of rows is a multiple of something that matrix multiplication likes.

    Rows from `vocab_size` on stand for no token: they are zero, get no gradient, and stay so.
    """

    def __init__(self, config: ModelConfig, vocabulary_multiple: int) -> None:
        """A table for `config.vocab_size` tokens."""
        self.vocab_size = config.vocab_size
        rows = math.ceil(config.vocab_size / vocabulary_multiple) * vocabulary_multiple
        padding = PAD_ID if config.has_padding_row else None
        super().__init__(rows, config.hidden_size, padding_idx=padding)

    def reset_parameters(self) -> None:
        """Draw as much as a table without padding does, so that what is drawn next is the same."""
        with torch.no_grad():
            self.weight[: self.vocab_size].normal_()


class Embeddings(nn.Module):
    """Look up, normalise, blank the mask, scale, add positions, norm, drop: in this order."""

    def __init__(self, config: ModelConfig, vocabulary_multiple: int = 1) -> None:
        """Tables and norms that `config` asks for."""
        super().__init__()
        self.config = config
        self.tokens = TokenEmbedding(config, vocabulary_multiple)
        self.positions: nn.Module | None = None
        if config.position == "learned":
            self.positions = LearnedPositions(config.max_positions, config.hidden_size)
        elif config.position == "sinusoidal":
            self.positions = SinusoidalPositions(config.hidden_size)
        self.norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
            if config.embedding_norm
            else None
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        """[B, T] ids and their mask (see Encoder.forward) to [B, T, D]."""
        if self.config.mask_embedding == "zero":
            is_mask = input_ids >= self.config.vocab_size
            input_ids = input_ids.clamp(max=self.config.vocab_size - 1)
        else:
            is_mask = None
        x: Tensor = self.tokens(input_ids)
        if self.config.normalize_embeddings:
            x = F.normalize(x, dim=-1, eps=smallest_length(x.dtype))
        if is_mask is not None:
            # After the normalisation, which a zero vector does not survive.
            x = x.masked_fill(is_mask[..., None], 0.0)
        x = x * self.config.scale
        if self.positions is not None:
            places = places_of(document_ids, input_ids.shape[1], x.device)
            x = x + self.positions(places).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        if document_ids is not None:
            x = x * (document_ids > 0)[..., None]
        return x
