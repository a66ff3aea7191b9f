"""Parity with the formulas of golden/make.py; test_parity.py has what EIFY/fairseq has as well."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from pretrain.model import presets
from pretrain.model.biases import t5_bucket
from pretrain.model.language_model import LanguageModel
from tests.pretrain.golden import albert, characters, make, modern
from tests.pretrain.golden import causal as formulas

MODELS = make.models()
TOLERANCE = 2e-5


def near(figures):
    return pytest.approx(figures, rel=TOLERANCE, abs=TOLERANCE)


def golden_model(name):
    (variant, *position), overrides = name.split(), {}
    if variant == "albert":
        overrides = {"embedding_size": albert.EMBEDDING_SIZE, **albert.SHARING[name]}
    if variant in characters.VARIANTS:
        latents = characters.LATENTS if variant == "char-perceiver" else 0
        overrides = {"num_layers": 3, "latents": latents}
        overrides |= {"position": position[0]} if position else {}
    if variant == "modern":
        overrides = {"local_window": modern.WINDOW, "global_every": modern.GLOBAL_EVERY}
    model = LanguageModel(presets.build("tiny", variant, make.VOCABULARY, overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(make.weight(name, tuple(parameter.shape))))
    return model


def golden_batch():
    """Ids of the texts, padded; the mask; places to predict and their labels."""
    length, rows = max(make.LENGTHS), range(len(make.LENGTHS))
    ids = torch.full((len(rows), length), 1)
    for row in rows:
        ids[row, : make.LENGTHS[row]] = torch.tensor(make.inputs(row))
    places = [(row, place) for row in rows for place in make.hidden(row)]
    labels = torch.tensor([make.ids(row)[place] for row, place in places])
    flat = torch.tensor([row * length + place for row, place in places])
    return ids, ids != 1, flat, labels


def test_every_variant_that_eify_fairseq_lacks_has_golden_figures():
    own = {name for name, delta in presets.VARIANTS.items() if delta.get("causal")}
    assert MODELS.keys() == own | {"modern"} | albert.SHARING.keys() | set(characters.MODELS)


@pytest.mark.parametrize("variant", MODELS)
def test_logits_loss_and_gradients_are_those_of_the_formulas(variant):
    model = golden_model(variant)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expected = make.figures(shapes, MODELS[variant])
    ids, mask, places, labels = golden_batch()
    logits = model(ids, mask, places)
    loss = cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    assert loss.item() == near(expected["loss"])
    assert logits[0, :8].tolist() == near(expected["first_logits"])
    assert logits[-1, -8:].tolist() == near(expected["last_logits"])
    norms = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    assert norms == near(expected["gradient_norms"])


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_are_those_of_the_formulas(causal):
    for distance in range(-140, 141):
        assert t5_bucket(distance, causal) == formulas.t5_bucket(distance, causal), distance
