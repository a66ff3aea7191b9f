"""No field of a model's architecture is lost in a model folder."""

import dataclasses

import pytest
import torch

from pretrain.convert.contents import ModelContents
from pretrain.convert.reading import read_folder
from pretrain.convert.writing import save_model
from pretrain.model import presets
from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel

OTHER = {
    "vocab_size": {"vocab_size": 61},
    "hidden_size": {"hidden_size": 64},
    "embedding_size": {"embedding_size": 16},
    "num_layers": {"num_layers": 4},
    "num_heads": {"num_heads": 2},
    "intermediate_size": {"intermediate_size": 48},
    "sharing": {"sharing": "feed-forward"},
    "layer_groups": {"sharing": "all", "num_layers": 4, "layer_groups": 2},
    "max_positions": {"max_positions": 50},
    "position_offset": {"position_offset": 1},
    "position": {"position": "sinusoidal"},
    "alibi": {"alibi": "symmetric"},
    "alibi_slopes": {"alibi_slopes": "trained"},
    "causal": {"causal": True},
    "segments": {"segments": 3},
    "pair_head": {"pair_head": True},
    "layer_norm": {"layer_norm": "pre"},
    "final_norm": {"final_norm": True, "layer_norm": "pre"},
    "activation": {"activation": "gelu-tanh"},
    "gated": {"gated": True},
    "biases": {"biases": False},
    "local_window": {"local_window": 2},
    "global_every": {"global_every": 2, "local_window": 2},
    "head": {"head": "clap"},
    "normalize_embeddings": {"normalize_embeddings": True},
    "embedding_scale": {"embedding_scale": "sqrt-hidden"},
    "embedding_norm": {"embedding_norm": False},
    "mask_embedding": {"mask_embedding": "zero"},
    "initial_beta": {"initial_beta": 2.0},
    "dropout": {"dropout": 0.2},
    "attention_dropout": {"attention_dropout": 0.3},
    "layer_norm_epsilon": {"layer_norm_epsilon": 0.3},
    "initial_weights": {"initial_weights": "truncated-normal"},
    "latents": {
        **{"latents": 2, "causal": True, "layer_norm": "pre"},
        **{"sharing": "none", "position": "learned"},
    },
}
"""Another value of each field, with what it needs."""
OPPOSITES = {
    ("albert", "activation"): {"activation": "gelu"},
    ("albert", "initial_weights"): {"initial_weights": "normal"},
}
"""Where a variant has the value above."""
CASES = [(variant, name) for variant in ("baseline", "albert", "alibi") for name in OTHER]
IDS = torch.tensor([[0, 7, 9, 2, 21, 22, 2], [0, 30, 59, 8, 5, 2, 2]])


def changed(variant, name):
    base = presets.build("tiny", variant, 60, {})
    values = OPPOSITES.get((variant, name), OTHER[name])
    config = ModelConfig(**{**base.to_dict(), **values})
    assert getattr(config, name) != getattr(base, name)
    return config


def random_weights(config):
    torch.manual_seed(5)
    state = LanguageModel(config).state_dict()
    return {name: weight + 0.3 * torch.randn_like(weight) for name, weight in state.items()}


def outputs(config, weights):
    """All logits, with two segments and pairs where the model has them."""
    model = LanguageModel(config).eval()
    model.load_state_dict(weights)
    segments = None
    if config.segments:
        segments = torch.tensor([0, 0, 0, 0, 1, 1, 1]).expand_as(IDS)
    places = torch.arange(IDS.numel())
    with torch.no_grad():
        found = model(IDS, None, places, segment_ids=segments, with_pairs=bool(config.pair_head))
    return found if config.pair_head else (found,)


def test_every_field_is_tried():
    assert [*OTHER] == [field.name for field in dataclasses.fields(ModelConfig)]


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_a_changed_field_comes_back(variant, name, tmp_path):
    """What comes back was read from config.json, and computes the same."""
    config = changed(variant, name)
    weights = random_weights(config)
    save_model(tmp_path / "model", ModelContents(config, weights, None, {}))
    back = read_folder(tmp_path / "model")
    assert back.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(back.weights[name], weight), name
    assert same_outputs(back.config, config, weights)
    read_in_training = ("dropout", "attention_dropout", "max_positions")
    for field in read_in_training:
        assert getattr(back.config, field) == getattr(config, field)


def same_outputs(back, config, weights):
    found = zip(outputs(config, weights), outputs(back, weights), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in found)
