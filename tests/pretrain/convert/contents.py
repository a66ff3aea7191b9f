"""Tiny models with random weights, for tests of model folders and of conversions."""

import dataclasses

import torch
from safetensors.torch import load_file, save_file

from pretrain.convert.contents import CLASSIFIER, ModelContents
from pretrain.model import presets
from pretrain.model.classification import ClassificationHead
from pretrain.model.language_model import LanguageModel


def random_contents(
    variant, vocabulary, classifier=None, provenance=None, rows=0, scale=0.05, **overrides
):
    """A model none of whose weights has its initial value.

    `rows` are of the token table, as of `presets.build`; the vocabulary's where nothing is said.
    `scale` is the standard deviation of what is added to the initial weights. With a classifier
    there are no other heads.
    """
    torch.manual_seed(7)
    config = presets.build("tiny", variant, rows or vocabulary.vocab_size, overrides)
    weights = dict(LanguageModel(config).state_dict())
    if classifier:
        config = dataclasses.replace(config, pair_head=False)
        weights = {name: w for name, w in weights.items() if "head." not in name}
        head = ClassificationHead(config.hidden_size, classifier)
        weights |= head.state_dict(prefix=CLASSIFIER)
    for weight in weights.values():
        weight += scale * torch.randn_like(weight)
    return ModelContents(config, weights, vocabulary, provenance or {}, classifier)


def without_pair_projection(folder):
    """Leave the pooler of a plain ALBERT without its pair head, as on the hub."""
    weights = load_file(path := folder / "model.safetensors")
    save_file({name: w for name, w in weights.items() if "sop_" not in name}, path)
