"""The pictures of a run's losses."""

import math

import numpy as np
import pytest

from pretrain.records.plots import plot_loss, smoothed
from pretrain.records.status import view
from tests.pretrain.histories import History


@pytest.fixture
def history():
    made = History()
    made.begin(steps=9)
    made.commit()
    made.train(5)
    return made


@pytest.fixture
def drawn(history, tmp_path, figures):
    """`drawn()`: the panels of the run of `history`."""

    def draw():
        run = tmp_path / "run"
        history.write(run)
        plot_loss(view(run))
        assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (run / "loss.svg").read_text()
        return figures[0].axes

    return draw


def labelled(axes, label):
    return [line for line in axes.lines if line.get_label() == label]


def test_rollbacks_open_spikes_and_phases_are_marked(history, drawn):
    history.spike(onset=10)
    history.roll_back(9)
    history.records[-1]["onset"] = 10
    history.begin(steps=3)
    history.spike(onset=11)
    (axes,) = drawn()
    for step, text in (
        (10, "spike from 10 on: back to 9, seed 6"),
        (11, "spike from 11 on"),
        (3, "phase 2"),
    ):
        (line,) = labelled(axes, text)
        assert {*line.get_xdata()} == {step}


def test_abandoned_steps_are_drawn_and_do_not_flatten_the_rest(history, drawn):
    for line, loss in zip(history.lines, (8.0, 5.0), strict=False):
        line["loss"] = loss
    history.lines[-2]["loss"], history.lines[-1]["loss"] = 1e6, None
    history.begin(steps=9)
    (axes,) = drawn()
    (abandoned,) = labelled(axes, "abandoned steps")
    (kept,) = labelled(axes, "training loss")
    assert [*abandoned.get_xdata()] == [9, 10, 11, 12, 13]
    assert abandoned.get_zorder() > kept.get_zorder()
    assert [*kept.get_xdata()] == [*range(18)]
    assert 8 < axes.get_ylim()[1] < 12


def test_terms_have_a_panel_each_and_their_sum_has_none(history, drawn):
    for line in history.lines:
        line |= {"loss": 99.0, "terms": {"masked": {"loss": 4.0}, "sop": {"loss": 0.7}}}
    terms = {
        name: {"loss": loss, "perplexity": 1.0, "targets": 9}
        for name, loss in (("masked", 4.5), ("sop", 0.5))
    }
    for step in (5, 10):
        history.measure(step, terms=terms)
    values = {
        axes.get_title("left"): {
            round(float(y), 9)
            for line in axes.lines
            for y in line.get_ydata()
            if not line.get_label().startswith("phase")
        }
        for axes in drawn()
    }
    assert values == {"masked": {4.0, 4.5}, "sop": {0.7, 0.5}}


def test_evaluations_of_different_blocks_are_not_joined(history, drawn):
    for step, validation_id in ((5, "a"), (10, "a"), (10, "b"), (14, "b")):
        history.measure(step, validation_id=validation_id)
    (axes,) = drawn()
    found = [[*curve.get_xdata()] for curve in labelled(axes, "validation loss")]
    assert found == [[5, 10], [10, 14]]


def test_a_smoothed_curve_is_the_mean_of_the_finite_values_around():
    values = [4.0, 2.0, math.nan, 6.0, 1.0]
    assert smoothed(values, 3).tolist() == [3.0, 3.0, 4.0, 3.5, 3.5]
    assert np.array_equal(smoothed(values, 1), values, equal_nan=True)
    assert smoothed([5.0], 9).tolist() == [5.0]
