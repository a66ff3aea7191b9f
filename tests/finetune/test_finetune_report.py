"""The report: medians and spreads of what the runs wrote."""

import json

import pytest

from finetune import report
from finetune.__main__ import main


def write_run(folder, weights, seed, best, last):
    run = folder / f"CoLA-{weights}-seed{seed}"
    run.mkdir(parents=True)
    result = {
        "plan": {"data": str(folder / "glue")},
        "task": "CoLA",
        "weights": weights,
        "seed": seed,
        "best": {"epoch": 1, "accuracy": best, "matthews": best - 0.5},
        "last": {"epoch": 2, "accuracy": last, "matthews": last - 0.5},
        "majority": {"accuracy": 0.6, "matthews": 0.0},
        "train_examples": 1000,
        "dev_examples": 200,
    }
    (run / "result.json").write_text(json.dumps(result))


@pytest.fixture
def runs(tmp_path):
    for seed, best in ((1, 0.75), (2, 0.875), (3, 0.625)):
        write_run(tmp_path, "pretrained", seed, best, best - 0.125)
    write_run(tmp_path, "random", 1, 0.625, 0.5)
    return tmp_path


def test_a_summary_has_medians_and_spreads_of_best_and_last_epochs(runs):
    rows = report.summary(runs)["CoLA"]
    assert list(rows) == ["pretrained", "random", "majority"]
    assert rows["pretrained"].runs == 3
    assert rows["pretrained"].best["accuracy"] == report.Spread(0.75, 0.625, 0.875)
    assert rows["pretrained"].last["matthews"] == report.Spread(0.125, 0.0, 0.25)
    assert rows["random"].last["accuracy"] == report.Spread(0.5, 0.5, 0.5)
    assert rows["majority"].best["accuracy"].median == 0.6


def test_the_report_is_a_table_and_a_file(runs, capsys):
    assert main(["report", str(runs)]) == 0
    text = capsys.readouterr().out
    assert (runs / "report.md").read_text() == text.removesuffix("\n")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| pretrained | 3 | 0.7500 (0.6250 to 0.8750) |")
    assert table[-1].startswith("| majority class |  | 0.6000 |")
    lines = (runs / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [1, 2, 3, 1]


def test_data_that_is_not_the_benchmark_s_is_said_to_be_so(runs):
    assert "not the benchmark's" not in report.write_report(runs)
    (runs / "glue" / "CoLA").mkdir(parents=True)
    (runs / "glue" / "CoLA" / "provenance.json").write_text('{"made": "of thin air"}')
    assert "The data is not the benchmark's: of thin air." in report.write_report(runs)


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "has no finished run" in capsys.readouterr().err
