"""The encoder: embeddings and layers, from token ids to features."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .attention import AttentionBias, AttentionContext, dense_bias, uses_tiles
from .config import ModelConfig, check_backend
from .embeddings import Embeddings
from .flex import TILE, flex_bias
from .layers import EncoderLayer
from .positions import position_module, token_positions


class Encoder(nn.Module):
    """The transformer encoder; its output is the last layer's, without a norm after it."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_multiple: int = 1,
        attention_backend: str = "dense",
    ) -> None:
        """Make N layers and a token table whose rows are padded to a multiple.

        Raises:
            ValueError: the attention back end is unknown, or cannot compute the model.
        """
        super().__init__()
        check_backend(config, attention_backend)
        self.config = config
        self.attention_backend = attention_backend
        self.embeddings = Embeddings(config, vocabulary_multiple)
        self.rotation = position_module(config.method.rotation, config)
        self.score_bias = position_module(config.method.score_bias, config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        target_positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the features of every token, or of the target positions.

        Args:
            input_ids: [B, T].
            document_ids: [B, T] or None, see the package's docstring.
            target_positions: [M] or None. Most of the last layer's work is done for these tokens
                only (as in MosaicBERT: Portes et al. 2023).

        Returns:
            [B, T, D], or [M, D] for the target positions.
        """
        x, context = self.embed(input_ids, document_ids)
        length = input_ids.shape[1]
        if target_positions is not None and x.shape[1] != length:
            target_positions = target_positions // length * x.shape[1] + target_positions % length
        for layer in self.layers[:-1]:
            x = layer(x, context)
        features: Tensor = self.layers[-1](x, context, target_positions)
        return features if target_positions is not None else features[:, :length]

    def hidden_states(self, input_ids: Tensor, document_ids: Tensor | None = None) -> list[Tensor]:
        """Return the input of the first layer and the output of each: N + 1 tensors [B, T, D]."""
        x, context = self.embed(input_ids, document_ids)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], context))
        return [state[:, : input_ids.shape[1]] for state in states]

    def embed(
        self, input_ids: Tensor, document_ids: Tensor | None
    ) -> tuple[Tensor, AttentionContext]:
        """Return the input of the first layer, [B, T, D], and what the attention of all reads.

        For FlexAttention, T is rounded up to whole tiles with padding.
        """
        x: Tensor = self.embeddings(input_ids, document_ids)
        if self.attention_backend != "dense" and (extra := -x.shape[1] % TILE):
            if document_ids is None:
                document_ids = torch.ones_like(input_ids, dtype=torch.bool)
            x, document_ids = F.pad(x, (0, 0, 0, extra)), F.pad(document_ids, (0, extra))
        rotation = None
        if self.rotation is not None:
            rotation = self.rotation(token_positions(document_ids, x.shape[1], x.device))
        scores = None if self.score_bias is None else self.score_bias(x.device)
        bias: AttentionBias
        if self.attention_backend == "dense":
            dropout = self.config.attention_dropout if self.training else 0.0
            tiled = uses_tiles(x, dropout) and self.layers[0]._compiled_call_impl is None
            bias = dense_bias(scores, document_ids, self.config.num_heads, x, tiled)
        else:
            bias = flex_bias(scores, document_ids, self.attention_backend)
        return x, AttentionContext(bias, rotation)
