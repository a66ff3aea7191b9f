"""The picture of a run's losses."""

import json
import math

import numpy as np
import pytest

from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.config.sections import DataConfig, PhaseConfig, TrainingConfig
from pretrain.records import metrics
from pretrain.records.curves import marks, smoothed
from pretrain.records.plots import plot_loss
from pretrain.records.status import view
from tests.pretrain.histories import SEED, History


@pytest.fixture
def history():
    made = History()
    made.begin()
    made.train(9)
    made.commit()
    made.train(5)
    return made


@pytest.fixture
def seen(history, tmp_path):
    """`seen(phases=...)`: the run of `history` with such a recipe."""

    def written(validation=(), **recipe):
        run = tmp_path / "run"
        history.write(run)
        training = TrainingConfig(steps=20_000, seed=SEED)
        recipes.dump(RunConfig(training=training, **recipe), run / "run.yaml")
        text = "".join(json.dumps(line) + "\n" for line in validation)
        (run / metrics.VALIDATION).write_text(text)
        return view(run)

    return written


def found(seen):
    return [
        (m.step, m.text, m.again)
        for m in marks(seen, metrics.read_metrics(seen.folder / "metrics.jsonl"))
    ]


def evaluated(step, measure="a", **more):
    score = {"loss": 5.0, "perplexity": math.exp(5.0), "targets": 10}
    return {"attempt": 1, "step": step, **score, "subsets": {}, "measure": measure, **more}


def labels_of(axes):
    return [line.get_label() for line in axes.lines]


def test_a_rollback_is_marked_at_the_onset_with_what_was_done_again(history, seen):
    history.spike(onset=10)
    history.roll_back(9)
    history.records[-1] |= {"onset": 10, "learning_rate_factor": 0.5, "learning_rate_steps": 9}
    history.begin()
    history.train(3)
    text = "spike from 10 on: back to 9, seed 6, 0.5 x learning rate"
    assert found(seen()) == [(10, text, range(9, 14))]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_crash_is_marked_where_it_stopped_with_or_without_a_supervisor(history, seen, recorded):
    if recorded:
        history.add("crash", attempt=1, reason="killed")
    history.begin()
    history.train(9)
    assert found(seen()) == [(14, "crash: back to 9", range(9, 14))]


def test_a_stop_at_a_checkpoint_is_not_marked(history, seen):
    history.commit()
    history.add("preempted", attempt=1, step=14)
    history.begin()
    assert found(seen()) == []


def test_a_spike_that_was_not_rolled_back_is_marked(history, seen):
    history.spike(onset=11)
    assert found(seen()) == [(11, "spike from 11 on", range(0))]


def test_phases_are_marked_with_the_weights_that_they_change(seen):
    corpora = {"a": {"path": "a"}, "b": {"path": "b", "weight": 3}}
    phases = [
        PhaseConfig(name="one", steps=10),
        PhaseConfig(steps=5, data={"corpora": {"b": {"weight": 0.5}}}),
        PhaseConfig(name="three", data={"corpora": {"b": {"weight": 0.5}}}),
    ]
    assert found(seen(data=recipes.decode(DataConfig, {"corpora": corpora}), phases=phases)) == [
        (10, "phase 2: weights a 1, b 0.5", range(0)),
        (15, "phase 3 (three)", range(0)),
    ]


def test_steps_abandoned_in_a_crash_are_drawn_above_the_same_losses(
    history, seen, figures, tmp_path
):
    history.begin()
    history.train(9)
    plot_loss(seen(), tmp_path / "loss.png")
    curves = {line.get_label(): line for line in figures[0].axes[0].lines}
    abandoned, kept = curves["abandoned steps"], curves["training loss"]
    assert [*abandoned.get_xdata()] == [9, 10, 11, 12, 13]
    assert abandoned.get_zorder() > kept.get_zorder()
    assert abandoned.get_linewidth() < kept.get_linewidth()


def test_losses_far_above_do_not_flatten_the_rest(history, seen, figures, tmp_path):
    for line, loss in zip(history.lines, (8.0, 5.0), strict=False):
        line["loss"] = loss
    history.lines[-2]["loss"], history.lines[-1]["loss"] = 1e6, None
    history.begin()
    history.train(9)
    plot_loss(seen(), tmp_path / "loss.png")
    axes = figures[0].axes[0]
    assert axes.get_ylim()[1] < 12
    assert "abandoned steps (they leave the panel, to 1e+06)" in labels_of(axes)


def test_terms_have_a_panel_each_and_their_sum_has_none(history, seen, figures, tmp_path):
    for line in history.lines:
        line |= {"loss": 99.0, "terms": {"masked": {"loss": 4.0}, "sop": {"loss": 0.7}}}
    terms = {"masked": {"loss": 4.5}, "sop": {"loss": 0.5}}
    lines = [evaluated(step, terms=terms) for step in (5, 10)]
    plot_loss(seen(lines), tmp_path / "loss.png")
    panels = {axes.get_title("left"): axes for axes in figures[0].axes}
    drawn = {
        name: {round(float(y), 9) for line in axes.lines for y in line.get_ydata()}
        for name, axes in panels.items()
    }
    assert drawn == {"masked": {4.0, 4.5}, "sop": {0.7, 0.5}}


def test_corpora_measured_several_times_are_small_multiples(seen, figures, tmp_path):
    corpora = [{"a": {"loss": 2.0}}, {"a": {"loss": 1.0}, "b": {"loss": 3.0}}]
    lines = [evaluated(5, corpora=corpora[0]), evaluated(10, corpora=corpora[1])]
    plot_loss(seen(lines), tmp_path / "loss.png")
    whole, corpus = figures[0].axes
    assert corpus.get_title("left") == "validation: a"
    assert [*corpus.lines[0].get_ydata()] == [2.0, 1.0]
    assert corpus.get_xlim() == whole.get_xlim()


def test_evaluations_of_different_blocks_are_not_joined(seen, figures, tmp_path):
    lines = [evaluated(5), evaluated(10), evaluated(10, "b"), evaluated(14, "b")]
    plot_loss(seen(lines), tmp_path / "loss.png")
    label = "validation loss, broken where it measures other blocks"
    curves = [line for line in figures[0].axes[0].lines if line.get_label() == label]
    assert [[*curve.get_xdata()] for curve in curves] == [[5, 10], [10, 14]]


def test_each_tick_says_how_many_tokens_were_read(seen, figures, tmp_path):
    plot_loss(seen(), tmp_path / "loss.png")
    tick = figures[0].axes[0].xaxis.get_major_formatter()
    assert [tick(step) for step in (-2, 0, 5, 14)] == ["-2\n", "0\n0", "5\n500", "14\n1.4 k"]


def test_a_smoothed_curve_is_the_mean_of_the_finite_values_around():
    values = [4.0, 2.0, math.nan, 6.0, 1.0]
    assert smoothed(values, 3).tolist() == [3.0, 3.0, 4.0, 3.5, 3.5]
    assert np.array_equal(smoothed(values, 1), values, equal_nan=True)
    assert smoothed([5.0], 9).tolist() == [5.0]
