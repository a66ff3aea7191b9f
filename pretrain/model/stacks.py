"""The encoder: embeddings and layers, from token ids to features."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .attention import AttentionBias, AttentionContext, dense_bias, uses_tiles
from .cache import KeyValueCache
from .config import ModelConfig, check_backend
from .embeddings import Embeddings
from .flex import TILE, flex_bias
from .layers import EncoderLayer
from .masks import is_causal_alone
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
        self.position_scale = 1.0
        """Factor on all positions: below 1 for inputs longer than in training (position
        interpolation: Chen et al. 2023). Only for methods that are `scalable`."""

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        target_positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Compute the features of every token, or of the target positions.

        Args:
            input_ids: [B, T].
            document_ids: [B, T] or None, see the package's docstring; with P tokens in the cache,
                [B, P + T].
            target_positions: [M] or None. Most of the last layer's work is done for these tokens
                only (as in MosaicBERT: Portes et al. 2023).
            cache: keys and values of the tokens before these, to which theirs are added.

        Returns:
            [B, T, D], or [M, D] for the target positions.

        Raises:
            ValueError: a cache is given to a model that is not causal, is being trained, or
                computes attention on another back end than `dense`.
        """
        length = input_ids.shape[1]
        fits = self.config.causal and not self.training and self.attention_backend == "dense"
        if cache is not None and not fits:
            raise ValueError(
                "cache: accepted for a causal model in evaluation mode, on the back end 'dense'"
            )
        if document_ids is None and cache is not None:
            document_ids = input_ids.new_ones(
                (len(input_ids), cache.length + length), dtype=torch.bool
            )
        x, context = self.embed(input_ids, document_ids)
        if target_positions is not None and x.shape[1] != length:
            target_positions = target_positions // length * x.shape[1] + target_positions % length
        contexts = [context] * len(self.layers)
        if cache is not None:
            contexts = [dataclasses.replace(context, extend=layer.extend) for layer in cache]
        for layer, of_layer in zip(self.layers[:-1], contexts[:-1], strict=True):
            x = layer(x, of_layer)
        features: Tensor = self.layers[-1](x, contexts[-1], target_positions)
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

        Raises:
            ValueError: `position_scale` is set and the position method cannot scale.
        """
        if self.position_scale != 1.0 and not self.config.method.scalable:
            raise ValueError(
                f"position_scale {self.position_scale}: accepted: 1 with {self.config.position} "
                "positions"
            )
        x: Tensor = self.embeddings(input_ids, document_ids, self.position_scale)
        if self.attention_backend != "dense" and (extra := -x.shape[1] % TILE):
            if document_ids is None:
                document_ids = torch.ones_like(input_ids, dtype=torch.bool)
            x, document_ids = F.pad(x, (0, 0, 0, extra)), F.pad(document_ids, (0, extra))
        rotation = None
        if self.rotation is not None:
            positions = token_positions(document_ids, x) * self.position_scale
            rotation = self.rotation(positions[..., -x.shape[1] :])
        scores = None
        if self.score_bias is not None:
            scores = self.score_bias(x.device, self.position_scale)
        dropout = self.config.attention_dropout if self.training else 0.0
        tiled = uses_tiles(x, dropout) and self.layers[0]._compiled_call_impl is None
        causal = self.config.causal
        if not tiled and scores is None and is_causal_alone(document_ids, causal, x):
            return x, AttentionContext(rotation=rotation, is_causal=True)
        bias: AttentionBias
        if self.attention_backend == "dense":
            bias = dense_bias(scores, document_ids, self.config.num_heads, x, tiled, causal)
        else:
            causal_length = x.shape[1] if causal else 0
            bias = flex_bias(scores, document_ids, self.attention_backend, causal_length, x.device)
        return x, AttentionContext(bias, rotation)
