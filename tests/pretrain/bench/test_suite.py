"""The benchmark: its cases and their batches, its time limit, and its reports."""

import dataclasses
import json
import os
import time

import numpy as np
import pytest
import torch

from pretrain.__main__ import main
from pretrain.bench import contenders, suite, worker
from pretrain.bench.contenders import Case, collate
from pretrain.objectives.tokens import IGNORED, labels_by_position

TINY = Case(contenders.PLAIN, "tiny", "zero-clap", 64, 2, "full", 97)


def measured(seconds=0.5, parts=None):
    return worker.Measured(seconds, 128, 2_000_000_000, 1.0, parts or {})


def result(*outcomes):
    return suite.Suite("a device", "2.13", 1e12, list(outcomes))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_cases_cover_every_contender_layout_and_size(on_gpu):
    cases = suite.cases(on_gpu)
    assert len(cases) == len(set(cases))
    other = contenders.EAGER if on_gpu else contenders.FLASH
    left_out = {other, contenders.FORWARD}
    assert {case.contender for case in cases} == set(contenders.CONTENDERS) - left_out
    assert {case.layout for case in cases} == set(contenders.LAYOUTS)
    assert {case.size for case in cases} == ({"base", "large"} if on_gpu else {"tiny", "small"})
    assert len({case.length for case in cases}) == 3
    assert all(case.rows >= 1 and case.architecture().attention_dropout == 0 for case in cases)
    if on_gpu:
        assert {case.length for case in cases} == {512, 2048, 4096}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_size_and_length_select_cases(on_gpu):
    cases = suite.cases(on_gpu, size="base", length=1024)
    assert len(cases) == len(set(cases)) > 8
    assert {(case.size, case.length) for case in cases} == {("base", 1024)}


def test_a_batch_depends_on_the_step_only():
    case = dataclasses.replace(TINY, layout="padded", rows=3)
    first, again, other = (collate(case, step).arrays for step in (4, 4, 5))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["input_ids"], other["input_ids"])
    lengths = first["document_ids"].sum(axis=1)
    assert first["input_ids"].shape == (3, 64)
    assert ((lengths >= 32) & (lengths <= 64)).all()


def test_transformers_predicts_the_same_tokens_at_the_same_positions():
    batch = collate(dataclasses.replace(TINY, layout="padded"), 0)
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    labels = labels_by_position(arrays)
    used = arrays["labels"] != IGNORED
    assert used.sum() == (labels != IGNORED).sum() == sum(batch.targets) > 0
    assert torch.equal(labels.flatten()[arrays["target_positions"][used]], arrays["labels"][used])


@pytest.mark.parametrize("layout", contenders.LAYOUTS)
def test_batches_follow_the_layout(layout):
    case = Case(contenders.PLAIN, "tiny", "baseline", 64, 3, layout, 97)
    batch = contenders.collate(case, 0)
    assert ("document_ids" not in batch.arrays) == (layout == "unmasked")
    mask = batch.arrays.get("document_ids", np.ones((3, 64)))
    assert batch.tokens == (mask > 0).sum()
    assert (batch.tokens < 3 * 64) == (layout == "padded")
    assert (mask.max() > 1) == (layout == "packed")


def test_utilization_is_computed_for_full_rows_only():
    outcome = suite.Outcome(TINY, measured(), "")
    flops = suite.needs.flops_per_token(TINY.architecture(), 64, 0.15)
    assert outcome.utilization(1e12) == pytest.approx(flops * 128 / 0.5 / 1e12)
    packed = Case(contenders.PLAIN, "tiny", "zero-clap", 64, 2, "packed", 97)
    assert suite.Outcome(packed, measured(), "").utilization(1e12) is None


def test_the_table_gives_the_reason_for_missing_figures():
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


def test_ratios_compare_cases_of_one_length_and_the_default_rows():
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
def test_the_cases_give_every_ratio_for_every_size(on_gpu):
    done = result(*(suite.Outcome(case, measured(), "") for case in suite.cases(on_gpu)))
    other = "eager" if on_gpu else "FLASH"
    assert [*done.ratios()] == [name for name in suite._RATIOS if other not in name]
    assert all(len(by_size) == 2 for by_size in done.ratios().values())


def test_figures_can_be_written_as_json_and_include_every_case():
    both = result(suite.Outcome(TINY, measured(), ""), suite.Outcome(TINY, None, "failed: x"))
    figures = json.loads(json.dumps(both.figures()))
    assert [case["problem"] for case in figures["cases"]] == ["", "failed: x"]
    assert figures["cases"][0]["tokens_per_second"] == 256
    assert figures["cases"][1]["tokens_per_second"] is None


def test_the_plot_needs_no_figures(tmp_path):
    longer = suite.Outcome(dataclasses.replace(TINY, variant="alibi", length=128), measured(), "")
    done, failed = suite.Outcome(TINY, measured(), ""), suite.Outcome(TINY, None, "x")
    for outcomes in ([], [failed], [done], [done, longer]):
        suite.plot(result(*outcomes), tmp_path / "cost.png")
        assert (tmp_path / "cost.png").stat().st_size > 5000


def test_an_error_is_reported_as_a_result():
    case = Case(contenders.PLAIN, "tiny", "no-such", 64, 2, "full", 97)
    assert worker.measure(case, 0.0).startswith("failed: model.variant: 'no-such'")


def test_out_of_memory_is_reported_as_a_result(monkeypatch):
    def exhausted(case, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(contenders.CONTENDERS, contenders.PLAIN, exhausted)
    assert worker.measure(TINY, 0.0) == "out of memory"


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
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def sleep(seconds):
    time.sleep(seconds)
    return "slept"


def die():
    os._exit(1)


@pytest.mark.slow  # starts processes
def test_a_call_that_takes_too_long_or_dies_does_not_stop_the_next():
    processes = suite.Processes()
    assert processes.call("a", time.monotonic() + 3, sleep, 60) == suite.LEFT_OUT
    assert processes.call("a", time.monotonic() - 1, sleep, 0) == suite.LEFT_OUT
    assert "died" in processes.call("a", time.monotonic() + 60, die)
    assert processes.call("a", time.monotonic() + 60, sleep, 0) == "slept"
    processes.close()


@pytest.mark.slow  # starts processes
def test_every_contender_is_measured_on_this_machine_and_logs_progress(capfd):
    cases = [
        Case(name, "tiny", "baseline" if "sdpa" in name else "zero-clap", 64, 2, "padded", 97)
        for name in contenders.CONTENDERS
    ]
    reported = []
    done = suite.run(cases, 4, lambda so_far: reported.append(len(so_far.outcomes)))
    assert reported == [*range(1, len(cases) + 1)]
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


@pytest.mark.slow  # starts processes
def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suite, "cases", lambda *_: [TINY])
    figures, plot = tmp_path / "figures.json", tmp_path / "cost.png"
    assert main(["bench", "--minutes", "2", "--json", str(figures), "--plot", str(plot)]) == 0
    (case,) = json.loads(figures.read_text())["cases"]
    assert f"{case['tokens_per_second']:,.0f}" in capsys.readouterr().out
    assert plot.is_file()


def test_the_parts_of_an_update_are_measured():
    case = Case(contenders.PLAIN, "tiny", "zero-clap", 64, 2, "packed", 97, parts=True)
    found = worker.measure(case, 0.0)
    assert tuple(found.parts) == suite.PARTS
    assert all(seconds > 0 for seconds in found.parts.values())
