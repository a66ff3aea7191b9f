"""The cost of position methods: its cases, its ratios, and its reports."""

import dataclasses
import json

import numpy as np
import pytest

from data_prep.tokenizer import Tokenizer
from pretrain.__main__ import main
from pretrain.bench import contenders, positions, worker
from pretrain.bench.contenders import Case
from pretrain.objectives.tokens import IGNORED

SINUSOIDAL = Case(contenders.PLAIN, "tiny", "causal-sinusoidal", 64, 2, "full", 97)


def outcome(method, ratios=(), peak=1e9, contender=contenders.PLAIN, length=512):
    case = dataclasses.replace(
        SINUSOIDAL, variant=f"causal-{method}", contender=contender, length=length
    )
    if not ratios:
        return positions.Outcome(case, None, "out of memory")
    return positions.Outcome(case, worker.Compared(1000.0, int(peak), list(ratios)), "")


def comparison(*outcomes):
    return positions.Comparison("a device", "2.13", list(outcomes))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_cases_differ_in_the_position_method_only_and_begin_with_sinusoidal(on_gpu):
    cases = positions.cases(on_gpu)
    assert {case.length for case in cases} == {512}
    assert {case.size for case in cases} == {"base" if on_gpu else "small"}
    for contender in positions.USES:
        of_use = [case for case in cases if case.contender == contender]
        assert len({dataclasses.replace(case, variant="") for case in of_use}) == 1
        assert of_use[0].variant == "causal-sinusoidal"
        methods = [case.architecture().position for case in of_use]
        assert methods == list(positions.METHODS[: len(methods)])
    assert len(set(cases)) == len(cases) == 14


def test_size_and_length_select_cases():
    chosen = positions.cases(False, size="base", length=1024)
    assert {(case.size, case.length, case.rows) for case in chosen} == {("base", 1024, 1)}


def test_only_t5_bias_and_learned_positions_have_parameters():
    figures = comparison(*(outcome(method) for method in positions.METHODS)).figures()
    counts = {entry["method"]: entry["parameters"] for entry in figures["methods"]}
    more = {method: count - counts["sinusoidal"] for method, count in counts.items()}
    assert more == {
        **dict.fromkeys(("sinusoidal", "alibi", "rotary", "none"), 0),
        "t5-bias": 32 * 4,
        "learned": (512 + 2) * 32,
    }


def test_ratios_are_medians_and_stand_beside_those_of_the_paper():
    done = comparison(
        outcome("sinusoidal", [1.0, 0.9, 1.1], peak=2e9),
        outcome("alibi", [0.9, 0.98, 1.5], peak=3e9),
        outcome("t5-bias"),
        outcome("sinusoidal", [1.0, 1.0, 1.0], contender=contenders.FORWARD),
        outcome("rotary", [0.5, 0.5, 0.5], contender=contenders.FORWARD),
    )
    entries = done.figures()["methods"]
    assert [entry["ratio"] for entry in entries] == [1.0, 0.98, None, 1.0, 0.5]
    assert [entry["memory_ratio"] for entry in entries] == [1.0, 1.5, None, 1.0, 1.0]
    paper = [entry["paper_ratio"] for entry in entries]
    assert paper == pytest.approx([1.0, 0.99, 0.51, 1.0, 0.53], abs=0.006)
    assert [entry["paper_memory_ratio"] is None for entry in entries] == [False] * 3 + [True] * 2
    assert entries[2]["problem"] == "out of memory"
    lines = positions.table(done).splitlines()
    found = [line.split() for line in lines if line.startswith("  ")]
    assert found[1][3:] == ["0.98", "(0.94,", "1.24)", "0.99", "3.00", "GB", "1.50", "1.00"]
    assert found[2][2:] == ["out", "of", "memory"]
    assert found[4][3:] == ["0.50", "(0.50,", "0.50)", "0.53", "1.00", "GB", "1.00"]


@pytest.mark.parametrize(("length", "nearest", "t5"), [(64, 512, 0.51), (2048, 3072, 0.28)])
def test_the_paper_is_quoted_at_its_nearest_length(length, nearest, t5):
    done = comparison(outcome("t5-bias", [1.0, 1.0], length=length))
    assert done.figures()["paper_length"] == nearest
    assert done.outcomes[0].paper_ratio == pytest.approx(t5, abs=0.006)
    assert f"at {nearest} tokens" in positions.table(done)


def test_a_method_without_a_baseline_or_a_place_in_the_paper_has_no_such_ratio():
    done = comparison(outcome("sinusoidal"), outcome("none", [0.8, 1.0]))
    assert done.memory_ratio(done.outcomes[1]) is None
    assert done.outcomes[1].paper_ratio is None
    assert "0.90 (0.85, 0.95)" in positions.table(done)


def test_causal_rows_begin_with_the_token_that_is_not_predicted():
    batch = contenders.collate(SINUSOIDAL, 0)
    assert (batch.arrays["input_ids"][:, 0] == Tokenizer.bos_id).all()
    used = batch.arrays["labels"] != IGNORED
    assert batch.targets == (used.sum(),) == (2 * 63,)
    places = batch.arrays["target_positions"][used]
    following = batch.arrays["input_ids"].ravel()[places + 1]
    assert np.array_equal(following, batch.arrays["labels"][used])


def test_the_plot_needs_no_figures(tmp_path):
    evaluated = outcome("alibi", [0.9, 1.0], contender=contenders.FORWARD)
    for outcomes in ([outcome("alibi")], [outcome("alibi", [0.9, 1.0]), evaluated]):
        positions.plot(comparison(*outcomes), tmp_path / "ratios.png")
        assert (tmp_path / "ratios.png").stat().st_size > 5000


@pytest.mark.parametrize("contender", [contenders.PLAIN, contenders.FORWARD])
def test_two_models_are_updated_by_turns(contender):
    baseline = dataclasses.replace(SINUSOIDAL, contender=contender)
    found = worker.compare(dataclasses.replace(baseline, variant="causal-alibi"), baseline, 0.0)
    assert len(found.ratios) == 3
    assert min(found.ratios) > 0
    assert found.tokens_per_second > 0
    assert found.peak_bytes > 50_000_000


def test_an_error_is_reported_as_a_result():
    unknown = dataclasses.replace(SINUSOIDAL, variant="causal-no-such")
    problem = "failed: model.variant: 'causal-no-such'"
    assert worker.compare(unknown, SINUSOIDAL, 0.0).startswith(problem)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes 0.0: accepted: above 0"),
        (["--plot", "cost.txt"], "--plot cost.txt: accepted: a name that ends in .png"),
        (["--size", "huge"], "'huge' is not one of base, large"),
        (["--length", "4"], "length 4: accepted: 8 or more"),
        (["--length", "0"], "length 0: accepted: 8 or more"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(arguments, message, capsys):
    assert main(["bench", "--positions", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow  # starts processes
def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(positions, "cases", lambda *_: [SINUSOIDAL])
    monkeypatch.setattr(positions, "_SECONDS", 0.1)
    figures, plot = tmp_path / "figures.json", tmp_path / "ratios.png"
    arguments = ["--minutes", "2", "--json", str(figures), "--plot", str(plot)]
    assert main(["bench", "--positions", *arguments]) == 0
    (entry,) = json.loads(figures.read_text())["methods"]
    assert f"{entry['tokens_per_second']:,.0f}" in capsys.readouterr().out
    assert plot.is_file()
