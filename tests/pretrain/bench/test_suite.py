"""The suite measures what it says, within its time, and hides nothing that it could not."""

import dataclasses
import json
import time

import numpy as np
import pytest

from pretrain.__main__ import main
from pretrain.bench import contenders, suite, worker
from pretrain.bench.contenders import Case

TINY = Case(contenders.PLAIN, "tiny", "zero-clap", 64, 2, "full", 97)


def measured(seconds=0.5, parts=None):
    return worker.Measured(seconds, 128, 2_000_000_000, 1.0, parts or {})


def result(*outcomes):
    return suite.Suite("a device", "2.13", 1e12, list(outcomes))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_contender_layout_size_and_variant_has_its_cases(on_gpu):
    cases = suite.cases(on_gpu)
    assert len(cases) == len(set(cases))
    elsewhere = {contenders.EAGER} | (set() if on_gpu else {contenders.FLASH})
    assert {case.contender for case in cases} == set(contenders.CONTENDERS) - elsewhere
    assert {case.layout for case in cases} == set(contenders.LAYOUTS)
    assert {case.size for case in cases} == ({"base", "large"} if on_gpu else {"tiny", "small"})
    assert len({case.length for case in cases}) == 3
    assert all(case.rows >= 1 and case.architecture().attention_dropout == 0 for case in cases)
    if on_gpu:
        assert {case.length for case in cases} == {512, 2048, 4096}


@pytest.mark.parametrize("layout", contenders.LAYOUTS)
def test_rows_are_as_the_layout_says(layout):
    case = Case(contenders.PLAIN, "tiny", "baseline", 64, 3, layout, 97)
    batch = contenders.collate(case, 0)
    assert ("document_ids" not in batch.arrays) == (layout == "unmasked")
    mask = batch.arrays.get("document_ids", np.ones((3, 64)))
    assert batch.tokens == (mask > 0).sum()
    assert (batch.tokens < 3 * 64) == (layout == "padded")
    assert (mask.max() > 1) == (layout == "packed")


def test_utilization_is_counted_for_full_rows_alone():
    outcome = suite.Outcome(TINY, measured(), "")
    flops = suite.plan.flops_per_token(TINY.architecture(), 64, 0.15)
    assert outcome.utilization(1e12) == pytest.approx(flops * 128 / 0.5 / 1e12)
    packed = Case(contenders.PLAIN, "tiny", "zero-clap", 64, 2, "packed", 97)
    assert suite.Outcome(packed, measured(), "").utilization(1e12) is None


def test_the_table_names_what_has_no_figures_and_why():
    parts = dict.fromkeys(suite.PARTS, 0.001)
    lines = suite.table(
        result(
            suite.Outcome(TINY, measured(parts=parts), ""),
            suite.Outcome(TINY, None, "out of memory"),
            suite.Outcome(TINY, None, suite.LEFT_OUT),
        )
    ).splitlines()
    assert lines[0] == "a device, torch 2.13; a matrix product reaches 1.00 TFLOP/s"
    assert lines[2].split()[-5:] == ["256", "0.0%", "2.00", "GB", "500.0"]
    assert lines[3].endswith("out of memory")
    assert lines[4].endswith("left out: no time")
    assert lines[-1].split()[-5:] == ["1.0"] * 5


def test_what_is_asked_is_answered_from_cases_of_one_length_and_the_usual_rows():
    def outcome(seconds, **changes):
        return suite.Outcome(dataclasses.replace(TINY, **changes), measured(seconds), "")

    done = result(
        outcome(0.5),
        outcome(0.6, contender=contenders.OURS),
        outcome(9.0, rows=1),
        outcome(9.0, contender=contenders.OURS, length=128),
        outcome(0.4, variant="baseline"),
        suite.Outcome(dataclasses.replace(TINY, variant="alibi"), None, "out of memory"),
        outcome(0.2, size="small"),
        outcome(0.1, size="small", contender=contenders.OURS),
    )
    name = "DeepSpeed / plain loop, zero-clap"
    assert done.ratios() == {name: {"tiny": pytest.approx(5 / 6), "small": pytest.approx(2)}}
    assert suite.table(done).splitlines()[-2:] == [
        f"{'tokens/s over tokens/s':62}       tiny      small",
        f"{name:62}       0.83       2.00",
    ]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_question_has_its_cases_for_every_size(on_gpu):
    done = result(*(suite.Outcome(case, measured(), "") for case in suite.cases(on_gpu)))
    questions = [name for name, *_ in suite._RATIOS if on_gpu or "FLASH" not in name]
    assert [*done.ratios()] == questions
    assert all(len(by_size) == 2 for by_size in done.ratios().values())


def test_figures_are_plain_and_hold_every_case():
    both = result(suite.Outcome(TINY, measured(), ""), suite.Outcome(TINY, None, "failed: x"))
    figures = json.loads(json.dumps(both.figures()))
    assert [case["problem"] for case in figures["cases"]] == ["", "failed: x"]
    assert figures["cases"][0]["tokens_per_second"] == 256
    assert figures["cases"][1]["tokens_per_second"] is None


def test_the_picture_is_drawn_of_whatever_was_measured(tmp_path):
    for outcomes in ([], [suite.Outcome(TINY, measured(), "")], [suite.Outcome(TINY, None, "x")]):
        suite.plot(result(*outcomes), tmp_path / "cost.png")
        assert (tmp_path / "cost.png").stat().st_size > 5000


def test_a_case_that_cannot_be_measured_is_a_result():
    case = Case(contenders.PLAIN, "tiny", "no-such", 64, 2, "full", 97)
    assert worker.measure(case, 0.0).startswith("failed: model.variant: 'no-such'")


def test_no_memory_is_a_result(monkeypatch):
    import torch

    def exhausted(case, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(contenders.CONTENDERS, contenders.PLAIN, exhausted)
    assert worker.measure(TINY, 0.0) == "out of memory"


def test_without_time_there_is_nothing_to_measure(capsys):
    assert main(["bench", "--suite", "--minutes", "0"]) == 2
    assert "--minutes 0.0: accepted: above 0" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(capsys):
    assert main(["bench", "--suite", "--plot", "cost.txt"]) == 2
    assert "--plot cost.txt: accepted: a name that ends in .png" in capsys.readouterr().err


def sleep(seconds):
    time.sleep(seconds)
    return "slept"


def die():
    import os

    os._exit(1)


@pytest.mark.slow  # starts processes
def test_what_takes_too_long_or_dies_is_ended_and_the_next_goes_on():
    processes = suite._Processes()
    assert processes.call("a", time.monotonic() + 3, sleep, 60) == suite.LEFT_OUT
    assert processes.call("a", time.monotonic() - 1, sleep, 0) == suite.LEFT_OUT
    assert "died" in processes.call("a", time.monotonic() + 60, die)
    assert processes.call("a", time.monotonic() + 60, sleep, 0) == "slept"
    processes.close()


@pytest.mark.slow  # starts processes
def test_every_contender_is_measured_on_this_machine_and_says_what_it_does(capfd):
    cases = [
        Case(name, "tiny", "baseline" if "sdpa" in name else "zero-clap", 64, 2, "padded", 97)
        for name in contenders.CONTENDERS
    ]
    told = []
    done = suite.run(cases, 4, lambda so_far: told.append(len(so_far.outcomes)))
    assert told == [*range(1, len(cases) + 1)]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("bench: ")]
    assert lines[0] == f"bench: {len(cases)} cases in at most 4 minutes; first a matrix product"
    for number, case in enumerate(cases, start=1):
        first = 1 + 4 * (number - 1)
        assert lines[first].startswith(f"bench: case {number} of {len(cases)}, ")
        assert lines[first].endswith(f" minutes left: {case.name()}")
        assert [line.removeprefix("bench:     ") for line in lines[first + 1 : first + 4]] == [
            "building the model",
            "warming up",
            "measuring",
        ]
    assert [outcome.problem for outcome in done.outcomes] == [""] * len(cases)
    assert all(outcome.tokens_per_second() > 0 for outcome in done.outcomes)
    assert done.peak > 1e9
    assert all(outcome.measured.peak_bytes > 50_000_000 for outcome in done.outcomes)


def test_the_parts_of_an_update_are_measured_each_by_itself():
    case = Case(contenders.PLAIN, "tiny", "zero-clap", 64, 2, "packed", 97, parts=True)
    found = worker.measure(case, 0.0)
    assert tuple(found.parts) == suite.PARTS
    assert all(seconds > 0 for seconds in found.parts.values())
