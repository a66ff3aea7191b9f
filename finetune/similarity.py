"""A check of a pretrained model before any fine-tuning: are similar sentences near each other?

The Spearman correlation of STS-B's labels with the cosines of mean-pooled features (Reimers and
Gurevych 2019). It takes seconds, and a model that is broken or read wrongly is near 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune.batches import EncodedExamples
from finetune.classifiers import longest_input
from finetune.config import FinetuneConfig
from finetune.evaluation import outputs_of
from finetune.examples import Example
from finetune.scores import spearman
from finetune.task import Task
from pretrain.models import model_folder

if TYPE_CHECKING:
    from torch import Tensor


def correlation(model: Path, pairs: Sequence[Example]) -> float:
    """Return the correlation of a model folder's cosines with the labels of pairs.

    Raises:
        ValueError: no such model folder.
    """
    from pretrain.engine.distributed import choose_device

    loaded, device = model_folder.load_model(model), choose_device(None)
    encoder = loaded.model.encoder.to(device)
    config = loaded.model.config
    limit = longest_input(FinetuneConfig.max_tokens, config)
    texts = [Example((text,)) for pair in pairs for text in pair.texts]
    encoded = EncodedExamples(
        Task("text"), texts, loaded.tokenizer, limit, segments=config.segments
    )

    def pooled(ids: Tensor, is_text: Tensor | None, segments: Tensor | None) -> Tensor:
        features: Tensor = encoder(ids, is_text, segment_ids=segments).float()
        if is_text is None:  # no row is padded
            return features.mean(dim=1)
        real = is_text.unsqueeze(-1)
        mean: Tensor = (features * real).sum(dim=1) / real.sum(dim=1)
        return mean

    vectors = np.stack(outputs_of(pooled, encoded, device))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (vectors[::2] * vectors[1::2]).sum(axis=1)
    return spearman(np.array([pair.label for pair in pairs]), cosines)
