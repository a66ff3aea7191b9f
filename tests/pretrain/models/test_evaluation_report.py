"""Tables and CSV of `evaluate`."""

import csv
import math

import pytest

from pretrain.models.evaluation_report import (
    heading,
    layer_table,
    layers_as_csv,
    pair_table,
    position_table,
    scores_as_csv,
    table_rows,
)
from pretrain.models.layers import LayerChange, LayerChanges
from pretrain.models.scores import Measured, Refusal, Score
from tests.pretrain.models.results import evaluation, score


def test_rows_fit_their_heading(measured):
    (line, *subsets) = table_rows(measured[0].results[0], True).splitlines()
    columns = [word.rstrip() for word in heading("windows", True).split()]
    values = ["3512", "7", "1,000", "50.0%", "5.1872", "178.97", "25.0%", "25.00"]
    assert dict(zip(columns, line.split(), strict=True))["interpolated"] == "25.00"
    assert line.split() == values
    assert [subset.split()[-1] for subset in subsets] == ["a", "b"]
    assert len(line) == len(heading("windows", True).rstrip("\n"))
    assert table_rows(measured[1].results[0], True).split("\n")[0].split()[-1] == "-"
    assert table_rows(measured[1].results[0], False).split("\n")[0].split()[-1] == "25.0%"
    assert table_rows(Refusal(1000, "no memory"), True) == "    1000 refused: no memory\n"


def test_the_table_by_position_leaves_out_groups_of_few_targets():
    few = evaluation(64, 9.0, {0: (9.0, 100), 16: (7.0, 99)})
    more = evaluation(128, 9.0, {0: (8.0, 100), 16: (7.0, 99), 32: (2e9, 500)})
    title, edges, *lines = position_table([few, more]).splitlines()
    assert edges.split() == ["length", "0", "32"]
    assert [line.split() for line in lines] == [["64", "9.00", "-"], ["128", "8.00", "2.0e+09"]]
    assert {len(line) for line in (edges, *lines)} == {28}
    assert position_table([evaluation(64, 9.0)]) == position_table([]) == ""


def test_csv_has_a_line_for_each_score_in_order_of_length(measured):
    lines = list(csv.DictReader(scores_as_csv(measured).splitlines()))
    counts = {
        name: [line["model"] for line in lines].count(name) for name in ("sinusoidal", "alibi")
    }
    assert counts == {"sinusoidal": 4 + 7, "alibi": 4 + 6}
    assert [line["length"] for line in lines[:5]] == ["512"] * 4 + ["3512"]
    assert lines[4] == {
        "model": "sinusoidal", "trained length": "512", "length": "3512", "stride": "3512",
        "part": "all", "targets": "1000", "loss": str(math.log(178.97)), "perplexity": "178.97",
        "accuracy": "0.25", "standard error of accuracy": str(math.sqrt(0.25 * 0.75 / 1000)),
    }  # fmt: skip
    assert [line["part"] for line in lines[5:7]] == ["interpolated", "from 0 tokens"]
    sliding = Measured("a", 8, [evaluation(16, 2.0, stride=4)])
    assert scores_as_csv([sliding]).splitlines()[1].startswith("a,8,16,4,all,")


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
    assert "of pairs in their order" in pairs
    assert "`masked` above: of pairs as in training" in pairs
    assert columns.split() == ["model", "trained", "on", "tokens", "MLM", "pairs", "NSP", "SOP"]
    assert [" ".join(line.split()) for line in lines] == [
        "order sop 9,000 54.0% ± 0.5% 400 78.9% ± 2.0% 86.5% ± 1.7%",
        "no task at all none 8,999 54.9% ± 0.5% 400 52.4% ± 2.5% 53.3% ± 2.5%",
    ]
    assert {len(line) for line in (columns, *lines)} == {len(columns)}
    assert pair_table(of_pairs[1:2]) == pair_table([]) == ""


def test_a_sum_of_terms_has_neither_perplexity_nor_accuracy(of_pairs):
    total, masked, order, *subsets = table_rows(of_pairs[0].results[0], False).splitlines()
    assert total.split()[-3:] == ["1.7918", "-", "-"]
    assert masked.split() == ["9,000", "1.0986", "3.00", "25.0%", "masked"]
    assert order.split() == ["400", "0.6931", "2.00", "25.0%", "sop"]
    assert [line.split()[2:] for line in subsets] == [["-", "-", "a"], ["-", "-", "b"]]


def test_the_only_term_with_targets_is_the_total():
    result = evaluation(64, 3.0, terms={"masked": score(3.0)})
    assert table_rows(result, False) == table_rows(evaluation(64, 3.0), False)


def test_csv_has_the_scores_of_pairs(of_pairs):
    lines = list(csv.DictReader(scores_as_csv(of_pairs).splitlines()))
    found = {(line["model"], line["part"]): line for line in lines}
    assert [part for name, part in found if name == "order"] == ["all", "masked", "sop", "nsp"]
    line = found["no task at all", "nsp"]
    assert (line["targets"], line["accuracy"]) == ("400", "0.524")
    assert float(line["standard error of accuracy"]) == pytest.approx(0.02497, rel=1e-3)


def changes(*layers):
    return LayerChanges(64, 7, 300, [LayerChange(*layer) for layer in layers])


def test_the_table_of_layers_has_a_line_for_each_layer_and_columns_for_each_model():
    deep, flat = changes((1.5, 0.5, 60.0), (12.25, -1.0, 180.0)), changes((0.0, 1.0, 0.0))
    found = {"deep": deep, "a model of a very long name, and flat": flat}
    note, _, title, names, columns, *lines = layer_table(found).splitlines()
    assert note == "deep: 300 tokens in 7 blocks of 64"
    assert "L2 distance, cosine similarity, and angle" in title
    assert names.split(maxsplit=1) == ["deep", "a model of a very long name, and flat"]
    assert columns.split() == ["layer", *["distance", "cosine", "degrees"] * 2]
    assert [line.split() for line in lines] == [
        ["1", "1.500", "0.5000", "60.00", "0.000", "1.0000", "0.00"],
        ["2", "12.250", "-1.0000", "180.00"],
    ]
    assert {len(line) for line in (names, columns, *lines)} == {len(names)}
    table = list(csv.DictReader(layers_as_csv(found).splitlines()))
    assert [(line["model"], line["layer"]) for line in table] == [
        ("deep", "1"), ("deep", "2"), ("a model of a very long name, and flat", "1"),
    ]  # fmt: skip
    assert table[1] == {
        "model": "deep", "layer": "2", "distance": "12.25", "cosine": "-1.0", "degrees": "180.0",
        "blocks": "7", "tokens": "300",
    }  # fmt: skip
