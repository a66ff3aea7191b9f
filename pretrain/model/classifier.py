"""The encoder with a classification head."""

from __future__ import annotations

from torch import Tensor, nn

from .config import check_pooling
from .heads import ClassificationHead
from .stacks import Encoder


class Classifier(nn.Module):
    """Token ids to the logits of classes."""

    def __init__(self, encoder: Encoder, head: ClassificationHead) -> None:
        """Keep both modules; nothing is copied.

        Raises:
            ValueError: the head cannot read what the encoder computes (`check_pooling`).
        """
        super().__init__()
        check_pooling(encoder.config, head.config.pooling)
        self.encoder = encoder
        self.head = head

    def forward(self, input_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        """[B, T] ids and [B, T] bool (True for real tokens; None: all) to [B, C] logits."""
        logits: Tensor = self.head(self.encoder(input_ids, document_ids), document_ids)
        return logits
