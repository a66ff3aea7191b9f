"""Embeddings and layers together: token ids to features."""

from __future__ import annotations

from torch import Tensor, nn

from .attention import attention_bias
from .blocks import EncoderBlock
from .config import ModelConfig
from .embeddings import Embeddings


class Encoder(nn.Module):
    """The transformer encoder; its output is the last layer's, with no norm after it."""

    def __init__(self, config: ModelConfig, vocabulary_multiple: int = 1) -> None:
        """N layers as `config` says; the token table padded to a multiple of rows."""
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, vocabulary_multiple)
        self.layers = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Features of every token.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T] bool, True for real tokens; or whole numbers where rows hold
                several texts: 0 for padding, else the number of the token's text, which it sees
                alone and is placed in. None where nothing is padded.

        Returns:
            [B, T, D]
        """
        x, bias = self._enter(input_ids, attention_mask)
        for layer in self.layers:
            x = layer(x, bias)
        return x

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> list[Tensor]:
        """What enters the first layer, then what leaves each: N + 1 tensors [B, T, D]."""
        x, bias = self._enter(input_ids, attention_mask)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], bias))
        return states

    def _enter(
        self, input_ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x: Tensor = self.embeddings(input_ids, attention_mask)
        return x, attention_bias(self.config, x.shape[1], attention_mask, x.dtype, x.device)
