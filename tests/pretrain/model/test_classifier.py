"""The classifier; its numbers are those of EIFY/fairseq in convert/test_fairseq.py."""

import pytest
import torch

from pretrain.model import presets
from pretrain.model.classification import ClassificationConfig, ClassificationHead, Classifier
from pretrain.model.encoder import Encoder


def classifier(pooling):
    torch.manual_seed(0)
    config = presets.build("tiny", "zero-clap", 300, {})
    head = ClassificationHead(config.hidden_size, ClassificationConfig(2, pooling=pooling))
    return Classifier(Encoder(config), head).eval()


@pytest.mark.parametrize(("pooling", "moves"), [("first", False), ("mean", True)])
def test_pooling_decides_which_features_the_head_reads(pooling, moves):
    head = classifier(pooling).head
    features = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, True, False]])
    changed = features.clone()
    changed[:, 2] += 1.0  # a real token other than the first
    assert bool((head(features, mask) != head(changed, mask)).any()) is moves
    assert head(features, torch.zeros_like(mask)).isfinite().all(), "a row of padding alone"


def test_the_head_begins_with_torch_s_own_draw():
    # Uniform in +-1/sqrt(D), standard deviation 0.10 at D = 32; the encoder's is 0.02.
    weight = classifier("first").head.dense.weight
    assert weight.std().item() == pytest.approx((3 * 32) ** -0.5, rel=0.1)
    assert weight.abs().max().item() <= 32**-0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classes": 0}, "classification head.classes: 0 .* a positive number"),
        ({"classes": True}, "classes: True"),
        ({"classes": 3, "labels": ("a", "b")}, "labels: .* one for each of 3 classes"),
        ({"classes": 2, "pooling": "last"}, "pooling: 'last' .* one of first, mean"),
        ({"classes": 2, "dropout": 1.0}, r"dropout: 1.0 .* in \[0, 1\)"),
    ],
)
def test_a_head_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ClassificationConfig(**fields)
