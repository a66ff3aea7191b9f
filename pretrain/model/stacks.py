"""Embeddings and layers together: token ids to features."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .attention import AttentionBias, attention_bias, bias_parts, uses_tiles
from .config import ModelConfig, check_backend
from .embeddings import Embeddings
from .flex import BLOCK, flex_bias
from .layers import EncoderLayer


class Encoder(nn.Module):
    """The transformer encoder; its output is the last layer's, with no norm after it."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_multiple: int = 1,
        attention_backend: str = "dense",
    ) -> None:
        """N layers as `config` says; the token table padded to a multiple of rows.

        Raises:
            ValueError: the attention backend is unknown, or cannot compute the model.
        """
        super().__init__()
        check_backend(config, attention_backend)
        self.config = config
        self.attention_backend = attention_backend
        self.embeddings = Embeddings(config, vocabulary_multiple)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        target_positions: Tensor | None = None,
    ) -> Tensor:
        """Features of every token, or of those asked for.

        Args:
            input_ids: [B, T].
            document_ids: [B, T] bool, True for real tokens; or whole numbers where rows hold
                several texts: 0 for padding, else the number of the token's text, which it sees
                alone and is placed in. None where nothing is padded.
            target_positions: [M] places in the flattened [B * T] batch; None: all. Most of the last
                layer's work is left out elsewhere (as in MosaicBERT: Portes et al. 2023).

        Returns:
            [B, T, D], or [M, D]
        """
        x, bias = self._enter(input_ids, document_ids)
        length = input_ids.shape[1]
        if target_positions is not None and x.shape[1] != length:
            target_positions = target_positions // length * x.shape[1] + target_positions % length
        for layer in self.layers[:-1]:
            x = layer(x, bias)
        features: Tensor = self.layers[-1](x, bias, target_positions)
        return features if target_positions is not None else features[:, :length]

    def hidden_states(self, input_ids: Tensor, document_ids: Tensor | None = None) -> list[Tensor]:
        """What enters the first layer, then what leaves each: N + 1 tensors [B, T, D]."""
        x, bias = self._enter(input_ids, document_ids)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], bias))
        return [state[:, : input_ids.shape[1]] for state in states]

    def _enter(
        self, input_ids: Tensor, document_ids: Tensor | None
    ) -> tuple[Tensor, AttentionBias]:
        """What enters the first layer, [B, T, D], and the bias of all.

        For FlexAttention T is rounded up to a whole number of blocks, with padding.
        """
        x: Tensor = self.embeddings(input_ids, document_ids)
        length = x.shape[1]
        if self.attention_backend == "dense":
            dropout = self.config.attention_dropout if self.training else 0.0
            if uses_tiles(x, dropout) and self.layers[0]._compiled_call_impl is None:
                return x, bias_parts(self.config, length, document_ids, x)
            return x, attention_bias(self.config, length, document_ids, x.dtype, x.device)
        if extra := -length % BLOCK:
            if document_ids is None:
                document_ids = torch.ones_like(input_ids, dtype=torch.bool)
            x, document_ids = F.pad(x, (0, 0, 0, extra)), F.pad(document_ids, (0, extra))
        return x, flex_bias(self.config, document_ids, x.device, self.attention_backend)
