"""The report: medians and spreads of the runs beside the published table."""

import csv
import json
import math

import pytest

from data_prep.common.files import write_json
from finetune import protocols, report
from finetune.__main__ import main
from finetune.report import UNCOLLAPSED, collect, spread, summary


def write_run(folder, weights, seed, best, last, *, collapsed="", task="CoLA"):
    run = folder / f"{task}-{weights}-seed{seed}"
    run.mkdir(parents=True)
    result = {
        "plan": {
            "task": task,
            "protocol": "default",
            "config": {"best_epoch_by": "published"},
        },
        "task": task,
        "weights": weights,
        "seed": seed,
        "collapsed": collapsed,
        "best": {"epoch": 1, "accuracy": best, "matthews": best - 0.5},
        "last": {"epoch": 2, "accuracy": last, "matthews": last - 0.5},
        "constant": {"accuracy": 0.6, "matthews": 0.0},
        "train_examples": 1000,
        "dev_examples": 200,
        "seconds": 10.0,
        "tokens_per_second": 5000.0,
        "device": "cpu",
    }
    if task == "STS-B":
        scores = {"epoch": 1, "published_loss": best, "pearson": 0.5, "spearman": 0.25}
        result |= {"best": scores, "last": scores, "constant": {**scores, "published_loss": 0.13}}
    result["epochs"] = [result["best"], {**result["last"], "epoch": 2}]
    write_json(run / "result.json", result)


@pytest.fixture
def runs(tmp_path):
    for seed, best in ((1, 0.75), (2, 0.875), (3, 0.625)):
        write_run(tmp_path, "pretrained", seed, best, best - 0.125)
    write_run(tmp_path, "random", 1, 0.625, 0.5)
    return tmp_path


def rows_of(folder, task="CoLA"):
    return summary(collect(folder))[task]


def test_a_summary_has_medians_and_spreads_of_best_and_last_epochs(runs):
    rows = rows_of(runs)
    assert list(rows) == ["pretrained", "random", "constant"]
    assert rows["pretrained"].runs == 3
    assert spread(rows["pretrained"].best["accuracy"]) == (0.75, 0.625, 0.875)
    assert spread(rows["pretrained"].last["matthews"]) == (0.125, 0.0, 0.25)
    assert spread(rows["random"].last["accuracy"]) == (0.5, 0.5, 0.5)
    assert rows["constant"].best["accuracy"] == [0.6]


def test_collapsed_runs_are_counted_and_reported_with_and_without(runs):
    write_run(runs, "pretrained", 4, 0.6, 0.6, collapsed="x")
    write_run(runs, "random", 4, 0.6, 0.6, collapsed="x")
    rows = rows_of(runs)
    assert list(rows) == ["pretrained", UNCOLLAPSED, "random", "constant"]
    everyone, succeeded = rows["pretrained"], rows[UNCOLLAPSED]
    assert (everyone.runs, everyone.collapsed) == (4, 1)
    assert spread(everyone.best["accuracy"]) == (0.6875, 0.6, 0.875)
    assert (succeeded.runs, succeeded.collapsed) == (3, 0)
    assert spread(succeeded.best["accuracy"]) == (0.75, 0.625, 0.875)
    text = report.write_report(runs)
    assert "| **ours**, pretrained | 68.8 (1 of 4) |" in text
    assert "| **ours**, pretrained, without collapsed | 75.0 |" in text


def test_the_row_without_collapsed_runs_has_every_task_with_a_run_that_did_not(runs):
    write_run(runs, "pretrained", 1, 0.13, 0.13, task="STS-B", collapsed="x")
    table = report.write_report(runs).splitlines()
    assert "| **ours**, pretrained | 75.0 |  |  |  |  |  |  | 0.130 (1 of 1) |" in table
    assert "| **ours**, pretrained, without collapsed | 75.0 |  |  |  |  |  |  |  |" in table


def test_a_diverged_regression_has_the_worst_score_and_standard_json(runs):
    for seed, best in ((1, 0.13), (2, math.inf), (3, math.inf)):
        write_run(runs, "pretrained", seed, best, math.inf, task="STS-B")
    row = rows_of(runs, "STS-B")["pretrained"]
    assert not (runs / "results.jsonl").exists()  # reading writes nothing
    report.write_report(runs)
    assert spread(row.best["published_loss"]) == (math.inf, 0.13, math.inf)
    for path in (runs / "results.jsonl", *runs.glob("STS-B*/result.json")):
        for line in (
            path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        ):
            json.loads(line, parse_constant=pytest.fail)


def test_the_report_is_printed_and_written(runs, capsys):
    assert main(["glue-report", str(runs)]) == 0
    text = capsys.readouterr().out
    assert (runs / "report.md").read_text() == text.removesuffix("\n")
    section = text.split("## CoLA")[1]
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| pretrained | 3 | 0 | 0.7500 (0.6250 to 0.8750) |")
    assert table[-1].startswith("| best constant answer |  |  | 0.6000 |")
    lines = (runs / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [1, 2, 3, 1]


def test_the_published_table_is_beside_ours_in_its_units(runs):
    write_run(runs, "pretrained", 1, 0.031, 0.04, task="STS-B")
    text = report.write_report(runs)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0] == "| model | CoLA | MNLI | MRPC | QNLI | QQP | RTE | SST-2 | STS-B |"
    assert "| large alibi | 69.1* | 86.5 | 68.4* | 92.4 | 91.7 | 52.7* | 93.6 | 0.123* |" in table
    assert "| base baseline | 83.6 | 84.2 | 90.0 | 91.6 | 91.3 | 73.6 | 92.1 | 0.028 |" in table
    assert "| **ours**, pretrained | 75.0 |  |  |  |  |  |  | 0.031 |" in table
    # Matthews 0.25, and the mean of Pearson 0.5 and Spearman 0.25.
    assert "| pretrained | 25.0 |  |  | 37.5 |  |  |  |  |  | 31.2 of 2 |" in table


def test_the_csv_has_one_line_per_number(runs):
    report.write_report(runs)
    with (runs / "report.csv").open() as file:
        lines = list(csv.DictReader(file))
    ours = next(line for line in lines if line["model"] == "pretrained")
    assert (ours["task"], ours["score"], ours["epoch"]) == ("CoLA", "accuracy", "best")
    assert (ours["median"], ours["lowest"], ours["highest"]) == ("0.75", "0.625", "0.875")
    printed = [line for line in lines if line["model"].startswith("published")]
    assert len(printed) == 8 * len(protocols.COLUMNS)
    assert sum(int(line["collapsed"]) for line in printed) == 6


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    assert main(["glue-report", str(tmp_path)]) == 2
    assert "has no finished run" in capsys.readouterr().err


def test_scores_beside_the_published_are_of_the_epoch_that_the_study_would_have_chosen(tmp_path):
    write_run(tmp_path, "pretrained", 1, 0.7, 0.8)
    path = next(tmp_path.glob("*/result.json"))
    result = json.loads(path.read_text())
    result["plan"]["config"]["best_epoch_by"] = "benchmark"
    result["best"]["matthews"] = result["epochs"][0]["matthews"] = 0.5
    write_json(path, result)
    text = report.write_report(tmp_path)
    assert "| **ours**, pretrained | 80.0 |" in text
    assert "| pretrained | 50.0 |" in text
    assert "the epoch with the best matthews" in text
    with (tmp_path / "report.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["epoch"] == report.AS_PUBLISHED]
    assert (lines[0]["model"], lines[0]["median"]) == ("pretrained", "0.8")
    assert len(lines) == 2 + 8 * len(protocols.COLUMNS)
