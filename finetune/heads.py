"""An encoder with a head on top, and what it learns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pretrain.loop import Model
from pretrain.model.language_model import LanguageModel


class Classifier(nn.Module):
    """The encoder of a language model under the original's sentence classification head.

    The head is dropout, dense, tanh, dropout, projection, on one vector a sentence (Devlin et al.
    2019, Liu et al. 2019). Its weights are torch's default draw for linear layers, as in the
    original: wider than the encoder's.
    """

    def __init__(
        self, model: LanguageModel, classes: int, pooling: str = "first", dropout: float = 0.0
    ) -> None:
        """A head with fresh weights, drawn from torch's global generator.

        Args:
            model: its encoder is taken over, its language model head is not.
            classes: how many.
            pooling: "first" (the feature of `<s>`) or "mean" (over all real tokens).
            dropout: before each linear layer of the head.
        """
        super().__init__()
        hidden_size = model.config.hidden_size
        self.encoder = model.encoder
        self.pooling = pooling
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.projection = nn.Linear(hidden_size, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of each class.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T] bool, True for real tokens.

        Returns:
            [B, C]
        """
        pooled = self._pool(self.encoder(input_ids, attention_mask), attention_mask)
        hidden = torch.tanh(self.dense(self.dropout(pooled)))
        logits: Tensor = self.projection(self.dropout(hidden))
        return logits

    def _pool(self, features: Tensor, attention_mask: Tensor) -> Tensor:
        if self.pooling == "first":
            return features[:, 0]
        real = attention_mask.unsqueeze(-1).to(features.dtype)
        return (features * real).sum(dim=1) / real.sum(dim=1)


class Classification:
    """The objective: the right class of each sentence."""

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy summed over the sentences, in nats, computed in fp32."""
        logits = model(batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(logits.float(), batch["labels"], reduction="sum")
