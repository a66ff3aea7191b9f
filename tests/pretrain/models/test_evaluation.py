"""Tables and the picture of `evaluate`."""

import dataclasses
import math

import pytest

from pretrain.models.evaluate import INTERVAL, Evaluation, Refusal, Score
from pretrain.models.evaluation import (
    Measured,
    draw_scores,
    heading,
    pair_table,
    table_rows,
)


def score(perplexity, targets=1000):
    return Score(math.log(perplexity), perplexity, targets, 0.25)


def evaluation(length, perplexity, terms=None, **more):
    subsets = {"a": score(2.0), "b": score(3.0)}
    return Evaluation(
        score(perplexity), subsets, terms or {}, length=length, blocks=7, coverage=0.5, **more
    )  # fmt: skip


@pytest.fixture
def measured():
    """Perplexities of Press et al. 2022, table 2; one length could not be measured."""
    sinusoidal = [evaluation(3512, 178.97), evaluation(512, 20.05)]
    alibi = [evaluation(512, 19.73), Refusal(1000, "no memory"), evaluation(3512, 18.40)]
    return [Measured("sinusoidal", 512, sinusoidal), Measured("alibi", 600, alibi)]


# --- tables --------------------------------------------------------------------------------------


def test_rows_fit_their_heading(measured):
    (line, *subsets) = table_rows(measured[0].results[0]).splitlines()
    assert line.split() == ["3512", "7", "1,000", "50.0%", "5.1872", "178.97", "25.0%"]
    assert [subset.split()[-1] for subset in subsets] == ["a", "b"]
    assert len(line) == len(heading("windows").rstrip("\n"))
    assert table_rows(Refusal(1000, "no memory")) == "    1000 refused: no memory\n"


def pairs(masked, nsp, sop):
    return {
        name: Score(1.0, math.e, targets, accuracy)
        for name, (targets, accuracy) in {"masked": masked, "nsp": nsp, "sop": sop}.items()
    }


@pytest.fixture
def of_pairs():
    """The accuracies of Lan et al. 2020, table 5, on 400 pairs."""
    terms = {"masked": score(3.0, 9000), "sop": score(2.0, 400)}
    trained = evaluation(
        512, 6.0, terms=terms, pairs=pairs((9000, 0.54), (400, 0.789), (400, 0.865))
    )
    untrained = evaluation(512, 3.0, pairs=pairs((8999, 0.549), (400, 0.524), (400, 0.533)))
    return [
        Measured("order", 512, [trained], "sop"),
        Measured("alibi", 512, [evaluation(512, 3.0)]),
        Measured("no task at all", 512, [untrained], "none"),
    ]


def test_the_table_of_pairs_has_a_line_for_each_model_with_a_pair_head(of_pairs):
    title, pairs, columns, *lines = pair_table(of_pairs).splitlines()
    assert title == "accuracy ± its standard error, of masked tokens and of each task's pairs"
    assert columns.split() == ["model", "trained", "on", "tokens", "MLM", "pairs", "NSP", "SOP"]
    assert [" ".join(line.split()) for line in lines] == [
        "order sop 9,000 54.0% ± 0.5% 400 78.9% ± 2.0% 86.5% ± 1.7%",
        "no task at all none 8,999 54.9% ± 0.5% 400 52.4% ± 2.5% 53.3% ± 2.5%",
    ]
    assert {len(line) for line in (columns, *lines)} == {len(columns)}
    assert pair_table(of_pairs[1:2]) == pair_table([]) == ""


def test_a_sum_of_terms_has_neither_perplexity_nor_accuracy(of_pairs):
    total, masked, order, *subsets = table_rows(of_pairs[0].results[0]).splitlines()
    assert total.split()[-3:] == ["1.7918", "-", "-"]
    assert masked.split() == ["9,000", "1.0986", "3.00", "25.0%", "masked"]
    assert order.split() == ["400", "0.6931", "2.00", "25.0%", "sop"]
    assert [line.split()[2:] for line in subsets] == [["-", "-", "a"], ["-", "-", "b"]]


def test_the_only_term_with_targets_is_the_total():
    result = evaluation(64, 3.0, terms={"masked": score(3.0)})
    assert table_rows(result) == table_rows(evaluation(64, 3.0))


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture
def axes(figures, tmp_path):
    """`axes(results)`: the axes that `draw_scores` drew."""

    def drawn(results):
        draw_scores(results, tmp_path / "a.png")
        return figures.pop().axes[0]

    return drawn


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines}


def test_the_picture_is_cut_where_curves_explode(measured, axes):
    drawn = axes(measured)
    assert [*lines_of(drawn)["sinusoidal"].get_ydata()] == [20.05, 178.97]
    assert [*lines_of(drawn)["alibi"].get_ydata()] == [19.73, 18.40]
    lowest, highest = drawn.get_ylim()
    assert lowest < 18.40
    assert 25 < highest < 35
    assert [label.get_text() for label in drawn.get_xticklabels()] == ["512", "3,512"]
    assert drawn.get_title("left") == "perplexity by length, non-overlapping windows"
    sliding = axes([Measured("a", 8, [evaluation(16, 2.0, stride=4)])])
    assert sliding.get_title("left") == "perplexity by length, sliding windows, stride 4"


def test_a_point_has_its_interval_as_a_bar(measured, axes):
    assert INTERVAL not in lines_of(axes(measured))
    found = measured[1].results[0]
    measured[1].results[0] = dataclasses.replace(found, interval=(19.0, 20.5))
    drawn = axes(measured)
    ((bar,),) = [collection.get_segments() for collection in drawn.collections]
    assert bar.tolist() == [[512, 19.0], [512, 20.5]]
    assert INTERVAL in lines_of(drawn)


def test_the_training_length_is_marked_on_the_curve(measured, axes):
    lines = axes(measured).lines
    marks = [line for line in lines if line.get_marker() == "D" and len(line.get_xdata())]
    found = {float(mark.get_xdata()[0]): float(mark.get_ydata()[0]) for mark in marks}
    assert found == {512: 20.05, 600: pytest.approx(19.73 - (19.73 - 18.40) * 88 / 3000)}


def test_a_picture_of_refusals_alone_is_drawn(axes):
    drawn = axes([Measured("a", 8, [Refusal(16, "no memory")])])
    assert lines_of(drawn).keys() == {"training length"}
