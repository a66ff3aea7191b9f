"""The encoder with a classification head."""

from __future__ import annotations

from torch import Tensor, nn

from .classification import check_pooling
from .encoder import Encoder
from .heads import ClassificationHead


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

    def forward(
        self, input_ids: Tensor, document_ids: Tensor | None, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of each row, [B, C].

        Args:
            input_ids: [B, T].
            document_ids: bool [B, T], True for real tokens; None: all.
            segment_ids: [B, T] or None, see the package's docstring.
        """
        features = self.encoder(input_ids, document_ids, segment_ids=segment_ids)
        return self.head(features, document_ids)
