"""A model as plain values: what is read from files of any form, and written to a model folder."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data_prep.tokenizer import Tokenizer
from pretrain.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.model.classification import ClassificationConfig

CLASSIFIER = "classifier."
"""Prefix of the weights of a classification head."""


@dataclasses.dataclass(frozen=True)
class ModelContents:
    """A language model, or an encoder with a classification head."""

    config: ModelConfig
    weights: Mapping[str, "Tensor"]
    """By their names in `LanguageModel`, and in `ClassificationHead` after `classifier.`; fp32 on
    the CPU. Those of the head over the vocabulary may be missing. `classifier.dense` alone is the
    pooler of an ALBERT without a head that reads it."""
    vocabulary: Tokenizer | None
    """None where there is none that fits the model."""
    provenance: Mapping[str, Any]
    """Where the model comes from."""
    classifier: "ClassificationConfig | None" = None
    notes: tuple[str, ...] = ()
    """For the user: what was added or left out when the model was read."""

    @property
    def has_head(self) -> bool:
        """Whether the model predicts tokens."""
        named = any(name.startswith("head.") for name in self.weights)
        return self.classifier is None and (named or self.config.head == "tied")

    @property
    def pooler(self) -> dict[str, "Tensor"]:
        """Weight and bias of `classifier.dense`; empty where there is none."""
        prefix = f"{CLASSIFIER}dense."
        names = [name for name in self.weights if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.weights[name] for name in names}
