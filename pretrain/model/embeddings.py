"""Token ids to the input of the first layer."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .config import ModelConfig
from .positions import position_module, token_positions

PAD_ID = 1


def smallest_length(dtype: torch.dtype) -> float:
    """Return the lower bound of a vector's length, by which a zero vector can be divided.

    1e-12 as in torch's `normalize`; in fp16, which rounds that to 0, the smallest normal number.
    """
    return max(1e-12, torch.finfo(dtype).tiny)


def layer_norm(config: ModelConfig, size: int | None = None) -> nn.LayerNorm:
    """Build a norm of D numbers, or of `size`."""
    size = size or config.hidden_size
    return nn.LayerNorm(size, eps=config.layer_norm_epsilon, bias=config.biases)


class TokenEmbedding(nn.Embedding):
    """A table whose number of rows is rounded up to a multiple, for fast matrix multiplication.

    Rows from `vocab_size` on belong to no token. They are zero, get no gradient, and stay zero.
    """

    def __init__(self, config: ModelConfig, vocabulary_multiple: int) -> None:
        """Make a table for `config.vocab_size` tokens."""
        self.vocab_size = config.vocab_size
        rows = math.ceil(config.vocab_size / vocabulary_multiple) * vocabulary_multiple
        padding = PAD_ID if config.has_padding_row else None
        super().__init__(rows, config.token_size, padding_idx=padding)

    def reset_parameters(self) -> None:
        """Draw as many numbers as a table without extra rows, so that later draws are the same."""
        if not self.weight.is_meta:
            with torch.no_grad():
                self.weight[: self.vocab_size].normal_()


class Embeddings(nn.Module):
    """Look up, normalise, zero the mask, scale, add segments and positions, norm, dropout, project.

    In this order.
    """

    def __init__(self, config: ModelConfig, vocabulary_multiple: int = 1) -> None:
        """Make the tables and norms of `config`."""
        super().__init__()
        self.config = config
        self.tokens = TokenEmbedding(config, vocabulary_multiple)
        size = config.token_size
        self.segments = nn.Embedding(config.segments, size) if config.segments else None
        self.positions = position_module(config.method.embedding, config)
        self.norm = layer_norm(config, size) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        is_smaller = size < config.hidden_size
        hidden, bias = config.hidden_size, config.biases
        self.projection = nn.Linear(size, hidden, bias=bias) if is_smaller else None

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        is_mask: Tensor | None = None,
    ) -> Tensor:
        """Look up ids [B, T]; padding becomes zero.

        Args:
            input_ids: [B, T].
            document_ids: [B, T] or None, see the package's docstring.
            segment_ids: [B, T] or None, likewise.
            positions: [T] or [B, T], counted from 0; None: those of `token_positions`.
            is_mask: bool [B, T], True where the vector is to be zero; None: where `mask_embedding`
                is "zero" and the table has no row for the id.

        Returns:
            [B, T, D]

        Raises:
            ValueError: the input is longer than the model's learned positions, or has segments that
                the model has not.
        """
        length, longest = input_ids.shape[1], self.config.longest_input
        if longest and length > longest:
            raise ValueError(
                f"input of {length} tokens: learned positions end at {longest} "
                "(a model with any other position method reads longer ones)"
            )
        if is_mask is None and self.config.mask_embedding == "zero":
            is_mask = input_ids >= self.config.vocab_size
            input_ids = input_ids.clamp(max=self.config.vocab_size - 1)
        vectors, of_segments, of_positions = self.tokens(input_ids), None, None
        if self.segments is not None:
            table = self.segments.weight
            of_segments = table[0] if segment_ids is None else self.segments(segment_ids)
        elif segment_ids is not None:
            raise ValueError("segment_ids: must be None for a model without segments")
        if self.positions is not None:
            if positions is None:
                positions = token_positions(document_ids, input_ids)
            of_positions = self.positions(positions)
        return self._combine(vectors, is_mask, of_segments, of_positions, document_ids)

    def _combine(
        self,
        x: Tensor,
        is_mask: Tensor | None,
        of_segments: Tensor | None,
        of_positions: Tensor | None,
        document_ids: Tensor | None,
    ) -> Tensor:
        """Compute what follows the lookups: one or two kernels if it is compiled.

        A compiled lookup would add up a row's gradients in bf16, and in no fixed order.
        """
        if self.config.normalize_embeddings:
            x = F.normalize(x, dim=-1, eps=smallest_length(x.dtype))
        if is_mask is not None:
            # After the normalisation, which a zero vector cannot have.
            x = x.masked_fill(is_mask[..., None], 0.0)
        x = x * self.config.scale
        if of_segments is not None:
            x = x + of_segments
        if of_positions is not None:
            x = x + of_positions.to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        if self.projection is not None:
            x = self.projection(x)
        if document_ids is not None:
            x = x * (document_ids > 0)[..., None]
        return x
