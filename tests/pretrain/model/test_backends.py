"""Which attention back end a run takes."""

import pytest

from pretrain.model import presets
from pretrain.model.backends import choose_backend
from pretrain.model.config import ModelConfig


@pytest.mark.parametrize(
    ("changes", "wanted", "on_gpu", "backend"),
    [
        ({"attention_dropout": 0.0}, "auto", True, "flex"),
        ({"attention_dropout": 0.1}, "auto", True, "dense"),
        ({"attention_dropout": 0.0}, "auto", False, "dense"),
        ({"attention_dropout": 0.0, "num_heads": 96}, "auto", True, "dense"),
        ({"attention_dropout": 0.0, "num_heads": 48}, "auto", True, "flex"),
        ({"attention_dropout": 0.0, "alibi_slopes": "trained"}, "auto", True, "flex"),
        ({"position": "alibi", "alibi_slopes": "trained"}, "auto", True, "dense"),
        ({"position": "alibi"}, "auto", True, "flex"),
        ({"position": "t5-bias"}, "auto", True, "dense"),
        ({"position": "t5-bias"}, "flex", True, "flex"),
        ({"attention_dropout": 0.0}, "dense", True, "dense"),
        ({"attention_dropout": 0.1}, "flex", False, "flex"),
    ],
)
def test_the_back_end_is_flex_where_a_gpu_can_compute_the_model(changes, wanted, on_gpu, backend):
    config = ModelConfig(99, **{"attention_dropout": 0.0, **changes})
    assert choose_backend(config, wanted, on_gpu) == backend


def test_models_with_latents_take_dense():
    config = presets.build("char", "char-perceiver", 99, {"attention_dropout": 0.0})
    assert choose_backend(config, "auto", on_gpu=True) == "dense"
