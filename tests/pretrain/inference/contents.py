"""Tiny models with random weights, for tests of model folders and of conversions."""

import torch

from pretrain.inference.model_folder import HEADS, ModelContents
from pretrain.model import presets
from pretrain.model.heads import ClassificationHead
from pretrain.model.language_model import LanguageModel


def random_contents(
    variant, vocabulary, heads=None, provenance=None, rows=0, scale=0.05, **overrides
):
    """A model none of whose weights has its initial value.

    `rows` are of the token table, as of `presets.build`; the vocabulary's where nothing is said.
    `scale` is the standard deviation of what is added to the initial weights.
    """
    torch.manual_seed(7)
    config = presets.build("tiny", variant, rows or vocabulary.vocab_size, overrides)
    weights = dict(LanguageModel(config).state_dict())
    for name, head in (heads or {}).items():
        state = ClassificationHead(config.hidden_size, head).state_dict()
        weights |= {f"{HEADS}{name}.{key}": weight for key, weight in state.items()}
    for weight in weights.values():
        weight += scale * torch.randn_like(weight)
    return ModelContents(config, weights, vocabulary, provenance or {}, heads or {})
