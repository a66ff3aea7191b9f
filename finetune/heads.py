"""The training objectives of classification and regression."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pretrain.loop.protocols import Model


class Classification:
    """Objective of a classification task."""

    terms: Mapping[str, float] = MappingProxyType({"classes": 1.0})

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy summed over the examples, in nats, computed in fp32: [1]."""
        logits = model(batch["input_ids"], batch["document_ids"], batch.get("segment_ids"))
        return F.cross_entropy(logits.float(), batch["labels"], reduction="sum").unsqueeze(0)


class Regression:
    """Objective of a regression task."""

    terms: Mapping[str, float] = MappingProxyType({"numbers": 1.0})

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the squared error summed over the examples, computed in fp32: [1]."""
        logits = model(batch["input_ids"], batch["document_ids"], batch.get("segment_ids"))
        return F.mse_loss(logits.float().squeeze(-1), batch["labels"], reduction="sum").unsqueeze(0)
