"""One layer of the encoder, and what can be done to all layers of a model."""

from __future__ import annotations

import functools

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import AttentionBias, SelfAttention, at_targets
from .config import ModelConfig
from .heads import ClapHead, RobertaHead


class EncoderLayer(nn.Module):
    """Attention, then feed-forward; each added to its input and normalised after (post-norm)."""

    def __init__(self, config: ModelConfig) -> None:
        """One layer of the given sizes."""
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.expand = nn.Linear(config.hidden_size, config.intermediate_size)
        self.contract = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, bias: AttentionBias, target_positions: Tensor | None = None
    ) -> Tensor:
        """[B, T, D] to [B, T, D]; with `target_positions` [M] to [M, D], those places alone.

        All tokens are read. What stands after the attention looks at one token at a time, so that
        leaving the others out changes nothing.
        """
        mixed = self.attention(x, bias, target_positions)
        x = self.attention_norm(at_targets(x, target_positions) + self.dropout(mixed))
        x = self.output_norm(x + self.dropout(self.contract(F.gelu(self.expand(x)))))
        return x


def checkpoint_activations(model: nn.Module) -> None:
    """Compute each layer again in the backward pass, with the dropout that it had."""
    for layer in model.modules():
        if isinstance(layer, EncoderLayer):
            # On the instance: hooks and the names of the weights stay as they are.
            layer.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint, layer.forward, use_reentrant=False
            )


def compile_layers(model: nn.Module) -> None:
    """Let torch.compile make the layers and the head, in place: the names of the weights stay.

    Each by itself rather than the whole model: the layers are alike, so that one is compiled for
    all (the last, at the masked places alone, is a second), and nothing worth fusing lies between.
    """
    for part in model.modules():
        if isinstance(part, EncoderLayer | RobertaHead | ClapHead):
            part.compile(dynamic=False)
