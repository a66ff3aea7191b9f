"""The classifier: EIFY/fairseq's head, and padding that changes nothing."""

import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file

from pretrain.model import presets
from pretrain.model.classification import ClassificationConfig
from pretrain.model.classifier import Classifier
from pretrain.model.encoder import Encoder
from pretrain.model.heads import ClassificationHead

GOLDEN_HEAD = "classification_heads.sentence_classification_head."
NAMES = (("dense", "dense"), ("projection", "out_proj"))


@pytest.mark.parametrize("name", ["cls3-baseline", "reg1-baseline"])
def test_logits_loss_and_gradients_are_the_original_s(name, golden):
    tensors = load_file(golden / f"{name}.safetensors")
    classes, size = tensors[f"model.{GOLDEN_HEAD}out_proj.weight"].shape
    head = ClassificationHead(size, ClassificationConfig(classes))
    head.load_state_dict(
        {
            f"{ours}.{kind}": tensors[f"model.{GOLDEN_HEAD}{theirs}.{kind}"]
            for ours, theirs in NAMES
            for kind in ("weight", "bias")
        }
    )
    logits = head(tensors["out.features"], None)
    torch.testing.assert_close(logits, tensors["out.cls_logits"], rtol=0, atol=1e-5)
    target = tensors["in.target"].flatten()
    if classes == 1:
        loss = F.mse_loss(logits.flatten(), target, reduction="sum")
    else:
        loss = F.cross_entropy(logits, target, reduction="sum")
    facts = json.loads((golden / f"{name}.json").read_text())
    assert loss.item() == pytest.approx(facts["loss_sum_nats"], abs=1e-4)
    loss.backward()
    gradients = load_file(golden / f"{name}.grads.safetensors")
    for ours, theirs in NAMES:
        for kind in ("weight", "bias"):
            gradient = getattr(getattr(head, ours), kind).grad
            expected = gradients[f"{GOLDEN_HEAD}{theirs}.{kind}"]
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


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
