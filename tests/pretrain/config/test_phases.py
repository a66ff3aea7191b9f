"""Phases: the settings of a step are a function of the recipe and the step."""

import dataclasses

import pytest

from pretrain.config.load import load
from pretrain.config.run import Segments
from pretrain.data.mixture import Mixture

RECIPE = """
data: {corpus: corpora/web, sequence_length: 128}
batch: {global_batch_size: 8, micro_batch_size: 2}
schedule: {name: constant, warmup_steps: 10, minimum_learning_rate: 1e-4}
optimizer: {learning_rate: 1e-3}
training: {steps: 100, evaluation_interval: 20, checkpoint_interval: 5}
spike: {margin_steps: 5, confirm_steps: 5, patience: 2}
"""
LONG = "{name: long, objective: {probability: 0.2}, data: {sequence_length: 256}}"


@pytest.fixture
def phased(tmp_path):
    """`phased(phases, *overrides)`: the recipe with these phases."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return lambda phases, *overrides: load(str(path), [f"phases={phases}", *overrides])


def spans(config):
    return [(phase.first_step, phase.end_step) for phase in config.segments.parts]


def test_without_phases_a_run_is_one_phase(phased):
    config = phased("[]")
    (phase,) = config.segments.parts
    assert (phase.first_step, phase.end_step, phase.config) == (0, 100, config)
    assert [source.name for source in config.segments.sources] == [""]
    assert config.segments.weights() == [(0, [1.0])]


def test_a_step_has_the_settings_of_its_phase_and_the_recipes_others(phased):
    config = phased(f"[{{steps: 60}}, {LONG}]")
    assert spans(config) == [(0, 60), (60, 100)]
    first, second = (config.segments.at(step).config for step in (59, 60))
    assert (first.data.sequence_length, second.data.sequence_length) == (128, 256)
    assert (first.objective.probability, second.objective.probability) == (0.15, 0.2)
    assert first == dataclasses.replace(config, phases=[])
    assert second.optimizer == config.optimizer
    assert config.segments.at(100).name == "phase 2 (long)"


def test_a_phase_changes_the_recipe_and_not_the_phase_before(phased):
    config = phased("[{steps: 30, batch: {global_batch_size: 16}}, {steps: 30}, {}]")
    sizes = [config.segments.at(step).config.batch.global_batch_size for step in (0, 30, 60)]
    assert sizes == [16, 8, 8]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("[{steps: 60}, {steps: 30}]", "90 steps in all, training.steps is 100.*steps=90"),
        ("[{}, {steps: 30}]", "phase 1: has no steps; only the last"),
        ("[{steps: 100}, {}]", "phase 2: has no length, and the phases before it have 100"),
        ("[{steps: -5}, {}]", r"phases\[0\].steps: -5"),
        ("[{steps: 50}, {model: {size: base}}]", r"unknown key 'phases\[1\].model'"),
        ("[{steps: 50}, {name: b, training: {seed: 2}}]", r"phase 2 \(b\): training.seed: .* can"),
        ("[{steps: 50}, {optimizer: {name: lamb}}]", "phase 2: optimizer.name: a phase cannot"),
        ("[{steps: 50}, {objective: {name: causal-lm}}]", "phase 2: objective.name: a phase can"),
        ("[{steps: 50}, {objective: {probabilit: 0.1}}]", "phase 2: unknown key .*probabilit"),
        ("[{steps: 50}, {data: {sequence_length: 1}}]", "phase 2: data.sequence_length: 1 is not"),
        ("[{steps: 50}, {training: {checkpoint_interval: 1}}]", "phase 2: .training.checkpoints"),
        ("[{steps: 50}, {schedule: {warmup_steps: 50}}]", "phase 2: .*warmup_steps 50 is not bel"),
        ("[{steps: 10}, {schedule: {warmup_steps: 0}}]", "phase 1: ends at step 10, during its w"),
    ],
)
def test_what_a_phase_cannot_be_is_refused_by_name(phased, phases, message):
    with pytest.raises(ValueError, match=message):
        phased(phases)


def test_the_runs_warmup_may_go_on_in_the_next_phase(phased):
    config = phased("[{steps: 5}, {}]")
    rates = [config.segments.learning_rate(step) for step in range(101)]
    assert rates == [phased("[]").segments.learning_rate(step) for step in range(101)]


def test_a_schedule_of_a_phase_counts_from_its_first_step(phased):
    own = "schedule: {name: wsd, warmup_steps: 4, cooldown_steps: 10}"
    peak = "{optimizer: {learning_rate: 2e-3}}"
    phases = f"[{{steps: 60}}, {{steps: 20, {own}}}, {peak}]"
    config = phased(phases)
    rates = [config.segments.learning_rate(step) for step in range(100)]
    assert rates[10:60] == [1e-3] * 50
    assert rates[60:64] == pytest.approx([1e-4, 3.25e-4, 5.5e-4, 7.75e-4])
    assert rates[64:70] == [1e-3] * 6
    assert rates[70:80] == pytest.approx([1e-3 - 9e-4 * (n / 10) ** 0.5 for n in range(10)])
    assert rates[80:] == [2e-3] * 20


def test_a_corpus_goes_on_where_it_was_cut_alike(phased):
    web, books = "path: corpora/web", "path: books"
    both = f"data: {{corpus: '', corpora: {{web: {{{web}}}, books: {{{books}, weight: 3}}}}}}"
    only = f"data: {{corpus: '', corpora: {{books: {{{books}}}}}, sequence_length: 64}}"
    config = phased(
        f"[{{steps: 20}}, {{steps: 20, {both}}}, {{steps: 20, {LONG[1:-1]}}}, {{{only}}}]"
    )
    names = ["web@128", "books@128", "web@256", "books@64"]
    assert [source.name for source in config.segments.sources] == names
    assert config.segments.weights() == [
        (0, [1, 0, 0, 0]),
        (20, [1, 3, 0, 0]),
        (40, [0, 0, 1, 0]),
        (60, [0, 0, 0, 1]),
    ]
    counts = Mixture.of_run(config.segments).counts(config.segments.sizes.first_block(100))
    assert counts == [20 * 8 + 5 * 8, 15 * 8, 20 * 8, 40 * 8]


def test_a_phase_may_change_the_weights_of_the_same_corpora(phased):
    both = ("data.corpus=''", "data.corpora={a: {path: a}, b: {path: b}}")
    config = phased("[{steps: 20}, {data: {corpora: {a: {weight: 3}}}}]", *both)
    assert [source.name for source in config.segments.sources] == ["a", "b"]
    assert config.segments.weights() == [(0, [1, 1]), (20, [3, 1])]


def test_another_recipe_holds_from_its_step_on_and_the_one_before_up_to_it(phased):
    first = phased("[{steps: 30}, {steps: 40, batch: {global_batch_size: 16}}, {}]")
    second = phased("[{steps: 50}, {optimizer: {learning_rate: 2e-3}}]", "training.steps=90")
    segments = Segments.of([(0, first), (40, second)])
    spans = [(part.first_step, part.end_step) for part in segments.parts]
    assert spans == [(0, 30), (30, 40), (40, 50), (50, 90)]
    assert [segments.sizes.size(step) for step in (29, 30, 39, 40)] == [8, 16, 16, 8]
    for step in range(90):
        own = first if step < 40 else second
        assert segments.learning_rate(step) == own.segments.learning_rate(step)
