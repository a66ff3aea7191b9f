"""Pictures of `evaluate`."""

import dataclasses

import pytest

from pretrain.models.evaluation_plots import draw_layers, draw_scores
from pretrain.models.layers import LayerChange, LayerChanges
from pretrain.models.scores import INTERVAL, Measured, Refusal
from tests.pretrain.models.results import evaluation


@pytest.fixture
def figure(figures, tmp_path):
    """`figure(results)`: matplotlib's figure that `draw_scores`, or another function, wrote."""

    def drawn(results, draw=draw_scores):
        draw(results, tmp_path / "a.png")
        return figures.pop()

    return drawn


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines}


def test_the_picture_is_cut_where_curves_explode(measured, figure):
    left, right = figure(measured).axes
    by_length, by_position = lines_of(left), lines_of(right)
    (exploded,) = [label for label in by_length if label.startswith("sinusoidal (")]
    assert exploded == "sinusoidal (leaves the panel, to 178.97)"
    assert [*by_length[exploded].get_xdata()] == [512, 3512]
    assert [*by_length["alibi"].get_ydata()] == [19.73, 18.40]
    assert [*by_length["sinusoidal, interpolated"].get_ydata()] == [20.05, 25.0]
    lowest, highest = left.get_ylim()
    assert 15 < lowest < 18.40
    assert 25 < highest < 35
    assert [label.get_text() for label in left.get_xticklabels()] == ["512", "3,512"]
    assert left.get_xscale() == "log"
    (exploded,) = [label for label in by_position if label.startswith("sinusoidal (")]
    assert exploded.endswith("to 1.0e+304)")
    assert 90 < right.get_ylim()[1] < 150
    edges = " ".join(label.get_text() for label in right.get_xticklabels())
    assert edges == "0 16 256 512 2,048"


def test_a_point_has_its_interval_as_an_error_bar(measured, figure):
    found = measured[1].results[0]
    measured[1].results[0] = dataclasses.replace(found, interval=(19.0, 20.5))
    left, _ = figure(measured).axes
    ((bar,),) = [collection.get_segments() for collection in left.collections]
    assert bar.tolist() == [[512, 19.0], [512, 20.5]]
    assert INTERVAL in lines_of(left)
    measured[1].results[0] = found
    assert INTERVAL not in lines_of(figure(measured).axes[0])


def test_the_training_length_is_marked_on_the_curve(measured, figure):
    left, _ = figure(measured).axes
    marks = [line for line in left.lines if line.get_marker() == "D" and len(line.get_xdata())]
    found = {float(mark.get_xdata()[0]): float(mark.get_ydata()[0]) for mark in marks}
    assert found == {512: 20.05, 600: pytest.approx(19.73 - (19.73 - 18.40) * 88 / 3000)}
    assert lines_of(left)["training length"].get_marker() == "D"


def test_the_picture_says_how_windows_were_cut(measured, figure):
    assert [axes.get_title("left") for axes in figure(measured).axes] == [
        "by length, non-overlapping windows",
        "by position, in windows of 3,512 tokens",
    ]
    measured[1].results.pop()
    assert figure(measured).axes[1].get_title("left") == "by position, in the longest windows"
    sliding = [Measured("a", 8, [evaluation(16, 2.0, stride=4)])]
    assert figure(sliding).axes[0].get_title("left") == "by length, sliding windows, stride 4"


def test_a_panel_without_a_curve_of_several_points_is_left_out(figure):
    early = {0: (9.0,), 16: (8.0,)}
    by_length = [evaluation(8, 9.0, {0: (9.0,)}), evaluation(16, 8.0, {0: (9.0,)})]
    for results, title in (
        (by_length, "by length, non-overlapping windows"),
        ([evaluation(8, 9.0, early)], "by position, in windows of 8 tokens"),
        ([evaluation(8, 9.0)], "by length, non-overlapping windows"),  # there is nothing else
    ):
        axes = figure([Measured("a", 8, results)]).axes
        assert [each.get_title("left") for each in axes] == [title]


def test_no_legend_is_over_points(measured, figure):
    assert [axes.get_legend() for axes in figure(measured).axes] == [None, None]


def test_a_picture_of_refusals_alone_is_drawn(figure):
    for axes in figure([Measured("a", 8, [Refusal(16, "no memory")])]).axes:
        assert not lines_of(axes).keys() - {"training length"}


def test_the_picture_of_layers_has_a_line_for_each_model(figure):
    numbers = [(2.0, 0.9, 25.0), (3.0, 0.8, 36.0)]
    deep = LayerChanges(64, 7, 300, [LayerChange(*layer) for layer in numbers])
    flat = LayerChanges(64, 7, 300, deep.layers[:1])
    left, right = figure({"deep": deep, "flat": flat}, draw_layers).axes
    assert [*lines_of(left)["deep"].get_xdata()] == [*lines_of(right)["deep"].get_xdata()] == [1, 2]
    assert [*lines_of(left)["deep"].get_ydata()] == [2.0, 3.0]
    assert [*lines_of(right)["deep"].get_ydata()] == [25.0, 36.0]
    assert [*lines_of(right)["flat"].get_ydata()] == [25.0]
