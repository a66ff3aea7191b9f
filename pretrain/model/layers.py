"""One layer of the encoder, and changes to all layers of a model."""

from __future__ import annotations

import functools

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import AttentionContext, SelfAttention, at_targets
from .config import ModelConfig
from .heads import VocabularyHead


class EncoderLayer(nn.Module):
    """Attention, then feed-forward; each is added to its input.

    The sums are normalised ("post"), or what attention and feed-forward read ("pre").
    """

    def __init__(self, config: ModelConfig) -> None:
        """Make one layer of the sizes in `config`."""
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.expand = nn.Linear(config.hidden_size, config.intermediate_size)
        self.contract = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)
        self.norm_first = config.layer_norm == "pre"
        self.activation = F.relu if config.activation == "relu" else F.gelu

    def forward(
        self, x: Tensor, context: AttentionContext, target_positions: Tensor | None = None
    ) -> Tensor:
        """[B, T, D] to [B, T, D]; with `target_positions` [M] to [M, D], those tokens only.

        Attention reads all tokens. What follows works on one token at a time, so that leaving the
        others out changes nothing.
        """
        read = self.attention_norm(x) if self.norm_first else x
        mixed = self.attention(read, context, target_positions)
        x = at_targets(x, target_positions) + self.dropout(mixed)
        if self.norm_first:
            return x + self._feed_forward(self.output_norm(x))
        x = self.attention_norm(x)
        output: Tensor = self.output_norm(x + self._feed_forward(x))
        return output

    def _feed_forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.contract(self.activation(self.expand(x))))
        return output


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer in the backward pass, with the dropout of the forward pass."""
    for layer in model.modules():
        if isinstance(layer, EncoderLayer):
            # On the instance: hooks and the names of the weights do not change.
            layer.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint, layer.forward, use_reentrant=False
            )


def compile_layers(model: nn.Module) -> None:
    """Compile the layers and the head in place; the names of the weights do not change.

    Each by itself rather than the whole model: the layers are alike, so that one compilation serves
    all (the last layer, at the target positions only, is a second), and nothing between them is
    worth fusing.
    """
    for part in model.modules():
        if isinstance(part, EncoderLayer | VocabularyHead):
            part.compile(dynamic=False)
