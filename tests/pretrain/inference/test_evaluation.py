"""Tables and the picture of `evaluate`."""

import math

import pytest

from pretrain.inference.evaluate import LengthScores, Refusal, Score
from pretrain.inference.evaluation import Measured, draw_scores, heading, table_rows


def score(perplexity, targets=1000):
    return Score(math.log(perplexity), perplexity, targets, 0.25)


def evaluation(length, perplexity, terms=None, **more):
    subsets = {"a": score(2.0), "b": score(3.0)}
    return LengthScores(
        score(perplexity), subsets, terms or {}, length=length, blocks=7, coverage=0.5, **more
    )  # fmt: skip


@pytest.fixture
def measured():
    """Perplexities of Press et al. 2022, table 2; one length could not be measured."""
    sinusoidal = [evaluation(3512, 178.97), evaluation(512, 20.05)]
    alibi = [evaluation(512, 19.73), Refusal(1000, "no memory"), evaluation(3512, 18.40)]
    found = [Measured("sinusoidal", 512, result) for result in sinusoidal]
    return found + [Measured("alibi", 600, result) for result in alibi]


# --- tables --------------------------------------------------------------------------------------


def test_rows_fit_their_heading(measured):
    (line, *subsets) = table_rows(measured[0].result).splitlines()
    assert line.split() == ["3512", "7", "1,000", "50.0%", "5.1872", "178.97", "25.0%"]
    assert [subset.split()[-1] for subset in subsets] == ["a", "b"]
    assert len(line) == len(heading("windows").rstrip("\n"))
    assert table_rows(Refusal(1000, "no memory")) == "    1000 refused: no memory\n"


@pytest.fixture
def of_pairs():
    """The accuracies of Lan et al. 2020, table 5, on 400 pairs."""
    terms = {"masked": score(3.0, 9000), "sop": score(2.0, 400)}
    pairs = {"nsp": Score(1.0, math.e, 400, 0.789), "sop": Score(1.0, math.e, 400, 0.865)}
    return evaluation(512, 6.0, terms=terms, pairs=pairs)


def test_a_sum_of_terms_has_neither_perplexity_nor_accuracy(of_pairs):
    total, masked, order, *subsets, next_one, in_order = table_rows(of_pairs).splitlines()
    assert total.split()[-3:] == ["1.7918", "-", "-"]
    assert masked.split() == ["9,000", "1.0986", "3.00", "25.0%", "masked"]
    assert order.split() == ["400", "0.6931", "2.00", "25.0%", "sop"]
    assert [line.split()[2:] for line in subsets] == [["-", "-", "a"], ["-", "-", "b"]]
    of_each = ["400 1.0000 2.72 78.9% pairs: nsp", "400 1.0000 2.72 86.5% pairs: sop"]
    assert [" ".join(line.split()) for line in (next_one, in_order)] == of_each


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


def test_the_picture_has_room_for_curves_that_explode(measured, axes):
    drawn = axes(measured)
    assert [*lines_of(drawn)["sinusoidal"].get_ydata()] == [20.05, 178.97]
    assert [*lines_of(drawn)["alibi"].get_ydata()] == [19.73, 18.40]
    assert drawn.get_yscale() == "log"
    assert [label.get_text() for label in drawn.get_xticklabels()] == ["512", "3,512"]
    assert drawn.get_title("left") == "perplexity by length, non-overlapping windows"
    sliding = axes([Measured("a", 8, evaluation(16, 2.0, stride=4))])
    assert sliding.get_title("left") == "perplexity by length, sliding windows, stride 4"


def test_the_training_length_is_marked_on_the_curve(measured, axes):
    lines = axes(measured).lines
    marks = [line for line in lines if line.get_marker() == "D" and len(line.get_xdata())]
    found = {float(mark.get_xdata()[0]): float(mark.get_ydata()[0]) for mark in marks}
    between = 19.73 * (18.40 / 19.73) ** (88 / 3000)
    assert found == {512: pytest.approx(20.05), 600: pytest.approx(between)}


def test_a_picture_of_refusals_alone_is_drawn(axes):
    drawn = axes([Measured("a", 8, Refusal(16, "no memory"))])
    assert lines_of(drawn).keys() == {"training length"}
