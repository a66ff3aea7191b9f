"""Features to logits over classes: the head, its record, and the encoder with it."""

import dataclasses

import torch
from torch import Tensor, nn

from .checks import check_kinds, check_value
from .encoder import Encoder

POOLINGS = ("first", "mean")


@dataclasses.dataclass(frozen=True)
class ClassificationConfig:
    """One classification head."""

    classes: int
    """Number of logits; 1 for a regression."""
    labels: tuple[str, ...] = ()
    """A name for each class, in the order of the logits; empty where the names are unknown."""
    pooling: str = "first"
    """Input of the head: "first", the feature of `<s>`, or "mean", the mean over all real
    tokens."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        prefix = "classification head."
        check_kinds(self, prefix)
        check_value(f"{prefix}classes", self.classes, self.classes >= 1, "a positive number")
        named = isinstance(self.labels, tuple) and all(isinstance(x, str) for x in self.labels)
        fits = named and len(self.labels) in (0, self.classes)
        expected = f"no name, or one for each of {self.classes} classes"
        check_value(f"{prefix}labels", self.labels, fits, expected)
        check_value(f"{prefix}pooling", self.pooling, self.pooling in POOLINGS, POOLINGS)
        check_value(f"{prefix}dropout", self.dropout, 0.0 <= self.dropout < 1.0, "in [0, 1)")


class ClassificationHead(nn.Module):
    """Dropout, dense, tanh, dropout, projection, on one vector per row.

    Devlin et al. 2019, Liu et al. 2019. The weights keep torch's default draw for linear layers, as
    in fairseq; it is wider than the encoder's, which `LanguageModel` draws its pair head from.
    """

    def __init__(self, hidden_size: int, config: ClassificationConfig) -> None:
        """Make a head with fresh weights, drawn from torch's global generator."""
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(config.dropout)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.projection = nn.Linear(hidden_size, config.classes)

    def forward(self, features: Tensor, document_ids: Tensor | None) -> Tensor:
        """[B, T, D] features and [B, T] bool (True for real tokens; None: all) to [B, C] logits."""
        pooled = self._pool(features, document_ids)
        hidden = torch.tanh(self.dense(self.dropout(pooled)))
        return self.projection(self.dropout(hidden))

    def _pool(self, features: Tensor, document_ids: Tensor | None) -> Tensor:
        if self.config.pooling == "first":
            return features[:, 0]
        if document_ids is None:
            return features.mean(dim=1)
        real = document_ids.unsqueeze(-1).to(features.dtype)
        return (features * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


class Classifier(nn.Module):
    """Token ids to the logits of classes."""

    def __init__(self, encoder: Encoder, head: ClassificationHead) -> None:
        """Keep both modules; nothing is copied.

        Raises:
            ValueError: the head cannot read what the encoder computes.
        """
        super().__init__()
        encoder.config.check_pooling(head.config.pooling)
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
