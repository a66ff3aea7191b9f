"""The language model: masked or causal."""

from __future__ import annotations

from torch import Tensor, nn

from .cache import KeyValueCache
from .config import ModelConfig
from .heads import build_head
from .init import initialize
from .stacks import Encoder


class LanguageModel(nn.Module):
    """An encoder and a head that share the token embedding."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_multiple: int = 1,
        attention_backend: str = "dense",
    ) -> None:
        """Make a model with fresh weights, drawn from torch's global generator.

        Args:
            config: the architecture.
            vocabulary_multiple: the token table gets rows of zeros up to a multiple of this
                number. They change neither the outputs nor how the weights are drawn.
            attention_backend: one of ATTENTION_BACKENDS.

        Raises:
            ValueError: the attention back end is unknown, or cannot compute the model.
        """
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, vocabulary_multiple, attention_backend)
        self.head = build_head(config)
        initialize(self)

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None,
        target_positions: Tensor,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Compute logits at the target positions only, because the head is a large matrix.

        Args:
            input_ids: [B, T]; ids from `vocab_size` on mean the mask where it is the zero vector.
            document_ids: [B, T] or None, see the package's docstring.
            target_positions: [M].
            cache: see `Encoder.forward`.

        Returns:
            [M, V]
        """
        features = self.encoder(input_ids, document_ids, target_positions, cache)
        logits: Tensor = self.head(features, self.encoder.embeddings.tokens.weight)
        return logits
