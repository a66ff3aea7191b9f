"""The record of a classification head, and a check of its pooling."""

from __future__ import annotations

import dataclasses

from .checks import check_kinds, check_value
from .config import ModelConfig

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


def check_pooling(config: ModelConfig, pooling: str) -> None:
    """Check that a causal model does not pool its first token, which sees no other.

    Raises:
        ValueError: the model is causal and the pooling is "first".
    """
    fits = pooling != "first" or not config.causal
    check_value(
        "pooling", pooling, fits, "'mean' for a causal model: its first token sees no other"
    )
