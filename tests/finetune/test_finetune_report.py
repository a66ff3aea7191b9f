"""The report: medians and spreads of the runs beside the published table."""

import json
import math

import pandas
import pytest

from data_prep.common.files import write_json
from finetune import report
from finetune.report import CONSTANT, UNCOLLAPSED, collect, summary
from finetune.zeroclap import main
from tests.finetune.conftest import result_like


def write_run(
    folder, weights, seed, best, last, *, collapsed=False, task="CoLA", best_epoch_by="published"
):
    run = folder / f"{task}-{weights}-seed{seed}"
    run.mkdir(parents=True)
    result = result_like(task, seed, weights=weights, best_epoch_by=best_epoch_by) | {
        "best": {"epoch": 1, "accuracy": best, "matthews": best - 0.5, "collapsed": collapsed},
        "last": {"epoch": 2, "accuracy": last, "matthews": last - 0.5, "collapsed": True},
        "constant": {"accuracy": 0.6, "matthews": 0.0},
    }
    if task == "STS-B":
        scores = {"epoch": 1, "published_loss": best, "pearson": 0.5, "spearman": 0.25}
        scores |= {"collapsed": collapsed}
        result["too_long"] = {"train": 4, "dev": 3}
        result |= {"best": scores, "last": scores, "constant": {**scores, "published_loss": 0.13}}
    result["epochs"] = [result["best"], {**result["last"], "epoch": 2}]
    write_json(run / "result.json", result)


@pytest.fixture
def runs(tmp_path):
    for seed, best in ((1, 0.75), (2, 0.875), (3, 0.625)):
        write_run(tmp_path, "pretrained", seed, best, best - 0.125)
    write_run(tmp_path, "random", 1, 0.625, 0.5)
    return tmp_path


def rows_of(folder, epoch, score):
    """Return runs, collapsed, median, lowest and highest of a score by kind of weights."""
    table = summary(collect(folder)).set_index(["epoch", "score"]).loc[[(epoch, score)]]
    return {row[0]: tuple(row)[2:] for row in table.to_numpy().tolist()}


def test_a_summary_has_medians_and_spreads_of_best_and_last_epochs(runs):
    assert rows_of(runs, "best", "accuracy") == {
        "pretrained": (3, 0, 0.75, 0.625, 0.875),
        "random": (1, 0, 0.625, 0.625, 0.625),
        CONSTANT: (0, 0, 0.6, 0.6, 0.6),
    }
    assert rows_of(runs, "last", "matthews")["pretrained"] == (3, 0, 0.125, 0.0, 0.25)


def test_collapsed_runs_are_counted_and_reported_with_and_without(runs):
    """The row without them has every task with a run that did not collapse."""
    write_run(runs, "pretrained", 4, 0.6, 0.6, collapsed=True)
    write_run(runs, "random", 4, 0.6, 0.6, collapsed=True)
    rows = rows_of(runs, "best", "accuracy")
    assert list(rows) == ["pretrained", UNCOLLAPSED, "random", CONSTANT]
    assert rows["pretrained"] == (4, 1, 0.6875, 0.6, 0.875)
    assert rows[UNCOLLAPSED] == (3, 0, 0.75, 0.625, 0.875)
    write_run(runs, "pretrained", 1, 0.13, 0.13, task="STS-B", collapsed=True)
    write_run(runs, "pretrained", 1, 0.8, 0.7, task="RTE")
    table = report.write_report(runs).splitlines()
    assert "| **ours**, pretrained | 68.8 (1 of 4) | 80.0 | 0.130 (1 of 1) |" in table
    assert "| **ours**, pretrained, without collapsed | 75.0 | 80.0 |  |" in table


def test_runs_of_other_settings_that_were_copied_into_the_folder_are_refused(runs):
    write_run(runs, "random", 9, 0.8, 0.7, best_epoch_by="benchmark")
    with pytest.raises(ValueError, match=r"CoLA-.*: not comparable with the runs beside it \(best"):
        report.write_report(runs)
    assert not (runs / "report.md").exists()


def test_a_diverged_regression_has_the_worst_score(runs):
    for seed, best in ((1, 0.13), (2, math.inf), (3, math.inf)):
        write_run(runs, "pretrained", seed, best, math.inf, task="STS-B")
    found = rows_of(runs, "best", "published_loss")["pretrained"]
    assert found == (3, 0, math.inf, 0.13, math.inf)


def test_a_task_without_published_scores_has_no_table_of_them(tmp_path):
    write_run(tmp_path, "pretrained", 1, 0.6, 0.6, task="WNLI")
    text = report.write_report(tmp_path)
    assert "Beside the published" not in text
    assert "| weights | WNLI | mean |" in text
    assert "| pretrained | 60.0 |  |" in text  # the published means leave it out
    write_run(tmp_path, "pretrained", 1, 0.7, 0.6, task="RTE")
    assert "| pretrained | 70.0 | 60.0 | 70.0 of 1 |" in report.write_report(tmp_path)


def test_the_report_is_printed_and_written_beside_the_published_table_in_its_units(runs, capsys):
    write_run(runs, "pretrained", 1, 0.031, 0.04, task="STS-B")
    assert main(["glue-report", str(runs)]) == 0
    text = capsys.readouterr().out
    assert (runs / "report.md").read_text() == text.removesuffix("\n")
    overview, of_cola = text.split("## CoLA")
    table = [line for line in overview.splitlines() if line.startswith("|")]
    assert table[0] == "| model | CoLA | STS-B |"  # the tasks that were run
    assert "| large alibi | 69.1* | 0.123 |" in table
    assert "| base baseline | 83.6 | 0.028 |" in table
    assert "| **ours**, pretrained | 75.0 | 0.031 |" in table
    # Matthews 0.25, and the mean of Pearson 0.5 and Spearman 0.25.
    assert "| pretrained | 25.0 | 37.5 | 31.2 of 2 |" in table
    table = [line for line in of_cola.split("##")[0].splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| pretrained | 3 | 0 | 0.7500 (0.6250 to 0.8750) |")
    assert table[-1].startswith("| best constant answer |  |  | 0.6000 |")
    missing = "4 training examples above max_tokens were left out. 3 other examples above max_"
    assert (text.count(missing), of_cola.count("above max_tokens")) == (1, 2)  # of STS-B alone


def test_the_benchmarks_score_is_the_median_of_each_runs_mean(tmp_path):
    for seed, (pearson, spearman) in enumerate([(0.2, 0.8), (0.4, 0.4), (0.8, 0.3)], start=1):
        write_run(tmp_path, "pretrained", seed, 0.03, 0.03, task="STS-B")
        path = tmp_path / f"STS-B-pretrained-seed{seed}" / "result.json"
        result = json.loads(path.read_text())
        result["best"] |= {"pearson": pearson, "spearman": spearman}
        write_json(path, result)
    # The means are 0.5, 0.4 and 0.55; the median of either score is 0.4.
    assert "| pretrained | 50.0 | 50.0 of 1 |" in report.write_report(tmp_path)


def test_the_csv_has_the_scores_of_the_epoch_that_the_study_chose_and_of_the_kept_model(tmp_path):
    write_run(tmp_path, "pretrained", 1, 0.7, 0.8, best_epoch_by="benchmark")
    text = report.write_report(tmp_path)
    assert "| **ours**, pretrained | 80.0 |" in text
    assert "| pretrained | 20.0 |" in text
    assert "the epoch with the best matthews" in text
    table = pandas.read_csv(tmp_path / "report.csv")
    ours = table[table.model == "pretrained"]
    assert ours[ours.epoch == report.AS_PUBLISHED]["median"].tolist() == [0.8]
    assert ours[ours.epoch == "best"]["median"].tolist() == pytest.approx([0.7, 0.2])
