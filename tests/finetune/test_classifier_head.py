"""The classifier: the original's head, and padding that changes nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file

from finetune.heads import Classification, Classifier
from pretrain import model_folder


class Fixed(torch.nn.Module):
    """An encoder whose features are known."""

    def __init__(self, features):
        super().__init__()
        self.features = features

    def forward(self, input_ids, attention_mask):
        return self.features


@pytest.fixture
def classifier(tiny_model):
    def build(pooling):
        torch.manual_seed(0)
        return Classifier(model_folder.load(tiny_model).model, 2, pooling).eval()

    return build


def golden_head(golden, name, tiny_model):
    tensors = load_file(golden / f"{name}.safetensors")
    key = "model.classification_heads.sentence_classification_head."
    classifier = Classifier(model_folder.load(tiny_model).model, 2)
    classifier.encoder = Fixed(tensors["out.features"])
    classes, size = tensors[key + "out_proj.weight"].shape
    classifier.dense = torch.nn.Linear(size, size)
    classifier.projection = torch.nn.Linear(size, classes)
    for ours, theirs in (("dense", "dense"), ("projection", "out_proj")):
        part = getattr(classifier, ours)
        part.load_state_dict({k: tensors[f"{key}{theirs}.{k}"] for k in ("weight", "bias")})
    return classifier, tensors


def test_logits_loss_and_gradients_of_the_head_are_the_original_s(golden, tiny_model):
    name = "cls3-baseline"
    classifier, tensors = golden_head(golden, name, tiny_model)
    ids = tensors["in.src_tokens"]
    logits = classifier(ids, ids != 1)
    torch.testing.assert_close(logits, tensors["out.cls_logits"], rtol=0, atol=1e-5)
    batch = {"input_ids": ids, "attention_mask": ids != 1, "labels": tensors["in.target"].flatten()}
    loss = Classification().loss(classifier, batch)
    facts = json.loads((golden / f"{name}.json").read_text())
    assert loss.item() == pytest.approx(facts["loss_sum_nats"], abs=1e-4)
    loss.backward()
    gradients = load_file(golden / f"{name}.grads.safetensors")
    key = "classification_heads.sentence_classification_head."
    for ours, theirs in (("dense", "dense"), ("projection", "out_proj")):
        for kind in ("weight", "bias"):
            gradient = getattr(getattr(classifier, ours), kind).grad
            torch.testing.assert_close(
                gradient, gradients[f"{key}{theirs}.{kind}"], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_padding_changes_no_logit(classifier, pooling):
    model = classifier(pooling)
    ids = torch.tensor([[0, 10, 11, 12, 2]])
    padded = torch.nn.functional.pad(ids, (0, 4), value=1)
    alone = model(ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(model(padded, padded != 1), alone, rtol=0, atol=1e-6)


def test_pooling_decides_which_features_the_head_reads(classifier):
    features = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, True, False]])
    changed = features.clone()
    changed[:, 2] += 1.0  # a real token other than the first
    for pooling, moves in (("first", False), ("mean", True)):
        model = classifier(pooling)
        logits = []
        for version in (features, changed):
            model.encoder = Fixed(version)
            logits.append(model(torch.zeros(1, 4), mask))
        assert bool((logits[0] != logits[1]).any()) is moves


def test_the_head_begins_with_torch_s_own_draw(classifier):
    # Uniform in +-1/sqrt(D), standard deviation 0.10 at D = 32; the encoder's is 0.02.
    model = classifier("first")
    assert model.dense.weight.std().item() == pytest.approx((3 * 32) ** -0.5, rel=0.1)
    assert model.dense.weight.abs().max().item() <= 32**-0.5
