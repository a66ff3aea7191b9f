"""The whole masked language model."""

from __future__ import annotations

from torch import Tensor, nn

from .config import ModelConfig
from .heads import build_head
from .init import initialize
from .stacks import Encoder


class LanguageModel(nn.Module):
    """Encoder and head, tied by the token embedding."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_multiple: int = 1,
        attention_backend: str = "dense",
    ) -> None:
        """A model with fresh weights, drawn from torch's global generator.

        Args:
            config: the architecture.
            vocabulary_multiple: the token table gets rows of zeros up to a multiple of this many.
                Nothing that comes out shows them, and the weights are drawn as without.
            attention_backend: one of ATTENTION_BACKENDS.

        Raises:
            ValueError: the attention backend is unknown, or cannot compute the model.
        """
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, vocabulary_multiple, attention_backend)
        self.head = build_head(config)
        initialize(self)

    def forward(
        self, input_ids: Tensor, document_ids: Tensor | None, target_positions: Tensor
    ) -> Tensor:
        """Logits at the places asked for, and nowhere else: the head is a large matrix.

        Args:
            input_ids: [B, T]; the mask is id `vocab_size` or above where it is the zero vector.
            document_ids: [B, T], see Encoder.forward; None where nothing is padded.
            target_positions: [M] places in the flattened [B * T] batch.

        Returns:
            [M, V]
        """
        features = self.encoder(input_ids, document_ids, target_positions)
        logits: Tensor = self.head(features, self.encoder.embeddings.tokens.weight)
        return logits
