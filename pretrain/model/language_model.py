"""The language model: masked or causal."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .classification import ClassificationConfig, ClassificationHead
from .config import ModelConfig
from .encoder import Encoder
from .heads import build_head
from .init import initialize

PAIRS = 2
"""Classes of the pair head: the second segment follows the first, or it does not."""


class LanguageModel(nn.Module):
    """An encoder and a head, which share the token embedding unless the head is untied."""

    def __init__(
        self, config: ModelConfig, vocabulary_multiple: int = 1, attention_backend: str = "dense"
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
        if config.pair_head:
            self.pair_head = ClassificationHead(config.hidden_size, ClassificationConfig(PAIRS))
        initialize(self, config.initial_weights)

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None,
        target_positions: Tensor,
        segment_ids: Tensor | None = None,
        with_pairs: bool = False,
        labels: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits at the target positions only, because the head is a large matrix.

        Args:
            input_ids: [B, T]; ids from `vocab_size` on mean the mask where it is the zero vector.
            document_ids: [B, T] or None, see the package's docstring.
            target_positions: [M].
            segment_ids: [B, T] or None, see the package's docstring.
            with_pairs: also compute the logits of the pair head.
            labels: [M] or None; the ids to predict, -100 where there is none.

        Returns:
            [M, V], or with labels their cross-entropy, summed in nats and fp32; with pairs, that
            and [B, 2]: whether the second segment follows the first (class 0) or does not (class
            1).
        """
        if with_pairs:
            # The features of `<s>`, after those of the targets.
            first = torch.arange(0, input_ids.numel(), input_ids.shape[1], device=input_ids.device)
            target_positions = torch.cat([target_positions, first])
        features = self.encoder(input_ids, document_ids, target_positions, segment_ids)
        vectors = self.encoder.embeddings.tokens.weight
        if not with_pairs:
            return self._predict(features, vectors, labels)
        targets = len(features) - len(input_ids)
        pairs: Tensor = self.pair_head(features[targets:].unsqueeze(1), None)
        return self._predict(features[:targets], vectors, labels), pairs

    def _predict(self, features: Tensor, vectors: Tensor, labels: Tensor | None) -> Tensor:
        """Compute the logits, or their loss: compiled together, without copies of the logits."""
        logits: Tensor = self.head(features, vectors)[..., : self.config.vocab_size]
        if labels is None:
            return logits
        return F.cross_entropy(logits.float(), labels, reduction="sum")
