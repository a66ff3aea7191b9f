"""Parity with the published formulas, from small files that stand in the repository.

golden/make.py makes them. test_parity.py compares with recordings of EIFY/fairseq, which
are larger and kept elsewhere.
"""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from pretrain.config import load as recipe
from pretrain.config.run import RunConfig
from pretrain.config.schedules import learning_rate
from pretrain.config.sections import OptimizerConfig, ScheduleConfig, TrainingConfig
from pretrain.engine import optimizers
from pretrain.model import presets
from pretrain.model.alibi import _UNSEEN, alibi_slopes
from pretrain.model.config import ModelConfig
from pretrain.model.language_model import LanguageModel
from pretrain.model.positions import Rotary
from pretrain.model.t5_bias import t5_bucket
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from tests.pretrain.golden import albert, characters, make, modern
from tests.pretrain.model.test_alibi import alibi
from tests.pretrain.model.test_positions import sinusoidal

MODELS, TABLES, MASKING, SCHEDULES, ADAM = map(
    make.read, ("models", "tables", "masking", "schedules", "adam")
)
TOLERANCE = 2e-5


def near(figures):
    return pytest.approx(figures, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("name", make.MAKERS)
def test_the_files_are_what_their_script_makes(name):
    """In all but the last digits, which may differ between machines."""

    def assert_same(now, then):
        assert type(now) is type(then)
        if isinstance(now, dict):
            assert now.keys() == then.keys()
            for key in now:
                assert_same(now[key], then[key])
        elif isinstance(now, list):
            for one, other in zip(now, then, strict=True):
                assert_same(one, other)
        elif isinstance(now, float):
            assert now == pytest.approx(then, rel=1e-9, abs=1e-9)
        else:
            assert now == then

    assert_same(make.MAKERS[name](), make.read(name))


# --- models -------------------------------------------------------------------------------------


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


def test_every_variant_has_golden_figures():
    others = albert.SHARING.keys() | set(characters.MODELS)
    assert MODELS.keys() == presets.VARIANTS.keys() | others


@pytest.mark.parametrize("variant", MODELS)
def test_logits_loss_and_gradients_are_those_of_the_formulas(variant):
    model, expected = golden_model(variant), MODELS[variant]
    ids, mask, places, labels = golden_batch()
    logits = model(ids, mask, places)
    loss = cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    assert loss.item() == near(expected["loss"])
    assert logits[0, :8].tolist() == near(expected["first_logits"])
    assert logits[-1, -8:].tolist() == near(expected["last_logits"])
    norms = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    assert norms == near(expected["gradient_norms"])


# --- tables, masking, schedules, the optimizer --------------------------------------------------


@pytest.mark.parametrize("heads", make.HEAD_COUNTS)
def test_alibi_tables_are_those_of_the_formulas(heads):
    slopes = TABLES["slopes"][str(heads)]
    assert alibi_slopes(heads) == pytest.approx(slopes, rel=1e-12)
    for kind, table in TABLES["alibi"].items():
        expected = torch.tensor(slopes)[:, None, None] * torch.tensor(table)
        torch.testing.assert_close(alibi(heads, 6, kind), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", [2, 4, 6, 12])
def test_alibi_tables_of_encoders_are_those_of_the_formulas(heads):
    before, after = (
        torch.tensor([[np.nan if cell is None else cell for cell in row] for row in table])
        for table in TABLES["alibi_sides"].values()
    )
    half = torch.tensor(TABLES["slopes"][str(heads // 2)])[:, None, None]
    one_sided = torch.cat([half * before, half * after]).nan_to_num(_UNSEEN)
    torch.testing.assert_close(alibi(heads, 6, "one-sided"), one_sided, rtol=1e-6, atol=0)
    slopes = torch.tensor(TABLES["slopes"][str(heads)])[:, None, None]
    by_direction = (slopes * before).nan_to_num() + (slopes.flip(0) * after).nan_to_num()
    torch.testing.assert_close(alibi(heads, 6, "by-direction"), by_direction, rtol=1e-6, atol=0)


def test_rotations_are_those_of_the_formulas():
    size, places = make.ROTATED.values()
    rotate = Rotary(ModelConfig(50, size, num_heads=1))(torch.tensor(places))
    numbers = torch.arange(1.0, size + 1).expand(1, len(places), 1, size)
    # An angle of 3000 is known to 3e-4 in fp32.
    expected = torch.tensor(TABLES["rotary"])
    torch.testing.assert_close(rotate(numbers)[0, :, 0], expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_are_those_of_the_formulas(causal):
    distances = range(-make.T5_DISTANCES, make.T5_DISTANCES + 1)
    expected = TABLES["t5_buckets"]["causal" if causal else "both ways"]
    assert [t5_bucket(distance, causal) for distance in distances] == expected


@pytest.mark.parametrize(("size", "places"), make.SINUSOIDS)
def test_sinusoidal_tables_are_those_of_the_formulas(size, places):
    last = sinusoidal(size, places)[-1]
    assert last.tolist() == near(TABLES["sinusoidal"][str(size)])


@pytest.mark.parametrize("key", make.KEYS, ids=str)
@pytest.mark.parametrize("name", MASKING)
def test_masks_are_drawn_as_the_formulas_say(name, key):
    settings = MaskedLMConfig(**make.MASKINGS[name])
    objective = MaskedLM(settings, make.WORDS, make.WORDS)
    ids, places = objective.mask(np.array(make.block(key)), key)
    assert {"ids": ids.tolist(), "places": places.tolist()} == MASKING[name][str(list(key))]


@pytest.mark.parametrize("label", SCHEDULES)
def test_learning_rates_are_those_of_the_formulas(label):
    name, peak, minimum, warmup, steps, _ = make.SCHEDULES[label]
    name = "overestimated-cosine" if name == "cosine" else name
    config = RunConfig(
        optimizer=OptimizerConfig(learning_rate=peak),
        schedule=ScheduleConfig(name, warmup, minimum),
        training=TrainingConfig(steps=steps),
    )
    assert len(SCHEDULES[label]) >= 4
    for step, rate in SCHEDULES[label]:
        found = learning_rate(config.segments, step)
        assert found == pytest.approx(rate, rel=1e-9, abs=1e-15), step


@pytest.mark.parametrize(
    ("label", "recorded"),
    [
        ("pile-base", {0: 6e-5, 5_000: 3.3e-4, 73_195: 3.874993e-4, 133_082: 9.307857e-5}),
        ("pile-large", {0: 4e-5, 5_000: 2.2e-4, 73_195: 2.583330e-4, 133_082: 6.205238e-5}),
        ("wikitext103", {0: 0.0, 5_000: 2.5e-4, 73_195: 2.252391e-4, 125_000: 0.0}),
    ],
)
def test_the_published_recipes_have_the_rates_that_the_study_recorded(label, recorded):
    config = recipe.load(label)
    for step, rate in recorded.items():
        found = learning_rate(config.segments, step)
        assert found == pytest.approx(rate, rel=1e-6, abs=1e-15), step


def test_three_updates_are_those_of_the_formulas():
    parameter = torch.nn.Parameter(torch.tensor(make.STARTS, dtype=torch.float64))
    module = torch.nn.Module()
    module.weights = parameter
    settings = OptimizerConfig(**make.ADAM)
    optimizer = optimizers.build(module, settings)
    for step, (rate, expected) in enumerate(zip(make.RATES, ADAM, strict=True)):
        parameter.grad = torch.tensor(make.gradient(step), dtype=torch.float64)
        optimizers.set_step(optimizer.param_groups, settings, rate, step)
        optimizer.step()
        assert parameter.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
