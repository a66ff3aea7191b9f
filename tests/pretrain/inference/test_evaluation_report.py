"""Tables, CSV and picture of `evaluate`."""

import csv
import math

import pytest

from pretrain.inference.evaluate import Evaluation, Refusal, Score
from pretrain.inference.evaluation_report import Measured, as_csv, draw, head, position_table, rows


def score(perplexity, targets=1000):
    return Score(math.log(perplexity), perplexity, targets, 0.25)


def evaluation(length, perplexity, positions=None, interpolated=None, **more):
    subsets = {"a": score(2.0), "b": score(3.0)}
    return Evaluation(
        score(perplexity), subsets, {}, length=length, blocks=7, coverage=0.5,
        positions={edge: score(*values) for edge, values in (positions or {}).items()},
        interpolated=interpolated and score(interpolated), **more,
    )  # fmt: skip


@pytest.fixture
def measured():
    """Perplexities of Press et al. 2022, table 2; one length could not be measured."""
    early = {0: (90.0,), 16: (40.0,), 256: (20.0,)}
    sinusoidal = [
        evaluation(3512, 178.97, {**early, 512: (150.0,), 2048: (1e304,)}, interpolated=25.0),
        evaluation(512, 20.05, early),
    ]
    alibi = [
        evaluation(512, 19.73, early),
        Refusal(1000, "no memory"),
        evaluation(3512, 18.40, {**early, 512: (18.0,), 2048: (17.0,)}),
    ]
    return [Measured("sinusoidal", 512, sinusoidal), Measured("alibi", 600, alibi)]


def test_rows_fit_their_heading(measured):
    (line, *subsets) = rows(measured[0].results[0], True).splitlines()
    columns = [word.rstrip() for word in head("windows", True).split()]
    values = ["3512", "7", "1,000", "50.0%", "5.1872", "178.97", "25.0%", "25.00"]
    assert dict(zip(columns, line.split(), strict=True))["interpolated"] == "25.00"
    assert line.split() == values
    assert [subset.split()[-1] for subset in subsets] == ["a", "b"]
    assert len(line) == len(head("windows", True).rstrip("\n"))
    assert rows(measured[1].results[0], True).split("\n")[0].split()[-1] == "-"
    assert rows(measured[1].results[0], False).split("\n")[0].split()[-1] == "25.0%"
    assert rows(Refusal(1000, "no memory"), True) == "    1000 refused: no memory\n"


def test_the_table_by_position_leaves_out_groups_of_few_targets():
    few = evaluation(64, 9.0, {0: (9.0, 100), 16: (7.0, 99)})
    more = evaluation(128, 9.0, {0: (8.0, 100), 16: (7.0, 99), 32: (2e9, 500)})
    title, edges, *lines = position_table([few, more]).splitlines()
    assert edges.split() == ["length", "0", "32"]
    assert [line.split() for line in lines] == [["64", "9.00", "-"], ["128", "8.00", "2.0e+09"]]
    assert {len(line) for line in (edges, *lines)} == {28}
    assert position_table([evaluation(64, 9.0)]) == position_table([]) == ""


def test_csv_has_a_line_for_each_score_in_order_of_length(measured):
    lines = list(csv.DictReader(as_csv(measured).splitlines()))
    counts = {
        name: [line["model"] for line in lines].count(name) for name in ("sinusoidal", "alibi")
    }
    assert counts == {"sinusoidal": 4 + 7, "alibi": 4 + 6}
    assert [line["length"] for line in lines[:5]] == ["512"] * 4 + ["3512"]
    assert lines[4] == {
        "model": "sinusoidal", "trained length": "512", "length": "3512", "stride": "3512",
        "part": "all", "targets": "1000", "loss": str(math.log(178.97)), "perplexity": "178.97",
        "accuracy": "0.25",
    }  # fmt: skip
    assert [line["part"] for line in lines[5:7]] == ["interpolated", "from 0 tokens"]
    sliding = Measured("a", 8, [evaluation(16, 2.0, stride=4)])
    assert as_csv([sliding]).splitlines()[1].startswith("a,8,16,4,all,")


@pytest.fixture
def figure(monkeypatch):
    """`figure(measured)`: matplotlib's figure that `draw` saved."""
    from matplotlib.figure import Figure

    saved, save = [], Figure.savefig

    def keep(figure, *arguments, **keywords):
        saved.append(figure)
        save(figure, *arguments, **keywords)

    def drawn(measured):
        assert draw(measured).startswith(b"\x89PNG")
        return saved.pop()

    monkeypatch.setattr(Figure, "savefig", keep)
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
    (exploded,) = [label for label in by_position if label.startswith("sinusoidal (")]
    assert exploded.endswith("to 1.0e+304)")
    assert 90 < right.get_ylim()[1] < 150
    assert [label.get_text() for label in right.get_xticklabels()] == [
        "0",
        "16",
        "256",
        "512",
        "2,048",
    ]


def test_the_training_length_is_marked_on_the_curve(measured, figure):
    left, _ = figure(measured).axes
    marks = [line for line in left.lines if line.get_marker() == "D" and len(line.get_xdata())]
    found = {float(mark.get_xdata()[0]): float(mark.get_ydata()[0]) for mark in marks}
    assert found == {512: 20.05, 600: pytest.approx(19.73 - (19.73 - 18.40) * 88 / 3000)}
    assert lines_of(left)["training length"].get_marker() == "D"


def test_the_picture_says_how_windows_were_cut(measured, figure):
    assert [axes.get_title() for axes in figure(measured).axes] == [
        "by length, non-overlapping windows",
        "by position, in windows of 3,512 tokens",
    ]
    measured[1].results.pop()
    assert figure(measured).axes[1].get_title() == "by position, in the longest windows"
    sliding = [Measured("a", 8, [evaluation(16, 2.0, stride=4)])]
    assert figure(sliding).axes[0].get_title() == "by length, sliding windows, stride 4"


def test_a_picture_of_nothing_is_drawn(figure):
    """Before the first result, and where every length was refused."""
    for measured in ([], [Measured("a", 8, [Refusal(16, "no memory")])]):
        assert all(
            not lines_of(axes).keys() - {"training length"} for axes in figure(measured).axes
        )
