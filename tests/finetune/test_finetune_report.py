"""The report: medians and spreads of the runs beside the published table."""

import csv
import itertools
import json
import math
import statistics

import pytest

from data_prep.common.files import write_json
from finetune import picture, published, report, similarity
from finetune.__main__ import main
from finetune.examples import Example
from finetune.summary import WITHOUT, Spread, collect, summary
from tests.finetune.conftest import WORDS


def write_run(folder, weights, seed, best, last, *, retry=0, collapsed="", task="CoLA"):
    run = folder / f"{task}-{weights}-seed{seed}-{retry}"
    run.mkdir(parents=True)
    result = {
        "plan": {
            "model": "none",
            "data": str(folder / "glue"),
            "config": {"best_epoch_by": "published"},
        },
        "task": task,
        "weights": weights,
        "seed": seed,
        "retry": retry,
        "collapsed": collapsed,
        "best": {"epoch": 1, "accuracy": best, "matthews": best - 0.5},
        "last": {"epoch": 2, "accuracy": last, "matthews": last - 0.5},
        "majority": {"accuracy": 0.6, "matthews": 0.0},
        "train_examples": 1000,
        "dev_examples": 200,
        "seconds": 10.0,
        "tokens_per_second": 5000.0,
        "device": "cpu",
    }
    if task == "STS-B":
        scores = {"epoch": 1, "seed_loss": best, "pearson": 0.5, "spearman": 0.25}
        result |= {"best": scores, "last": scores, "majority": {**scores, "seed_loss": 0.13}}
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
    assert list(rows) == ["pretrained", "random", "majority"]
    assert rows["pretrained"].runs == 3
    assert rows["pretrained"].best["accuracy"] == Spread(0.75, 0.625, 0.875)
    assert rows["pretrained"].last["matthews"] == Spread(0.125, 0.0, 0.25)
    assert rows["random"].last["accuracy"] == Spread(0.5, 0.5, 0.5)
    assert rows["majority"].best["accuracy"].median == 0.6


def test_collapsed_runs_are_counted_and_reported_with_and_without(runs):
    for retry, best, why in ((0, 0.6, "x"), (1, 0.6, "x"), (2, 0.8, "")):
        write_run(runs, "pretrained", 4, best, best, retry=retry, collapsed=why)
    write_run(runs, "pretrained", 5, 0.6, 0.6, collapsed="x")
    rows = rows_of(runs)
    assert list(rows) == ["pretrained", WITHOUT, "random", "majority"]
    everyone, succeeded = rows["pretrained"], rows[WITHOUT]
    assert (everyone.runs, everyone.collapsed) == (5, 2)
    assert everyone.best["accuracy"] == Spread(0.625, 0.6, 0.875)
    assert (succeeded.runs, succeeded.collapsed) == (4, 0)
    assert succeeded.best["accuracy"] == Spread(0.775, 0.625, 0.875)
    text = report.write_report(runs)
    assert "Retries of collapsed runs: 2, of which 1 succeeded." in text
    assert "62.5 (2 of 5)" in text
    assert "| **ours**, pretrained, without collapsed | 77.5 |" in text


def test_the_row_without_collapsed_runs_has_every_task_with_a_run_that_did_not(runs):
    write_run(runs, "pretrained", 1, 0.13, 0.13, task="STS-B", collapsed="x")
    table = report.write_report(runs).splitlines()
    assert "| **ours**, pretrained | 75.0 |  |  |  |  |  |  | 0.130 (1 of 1) |" in table
    assert "| **ours**, pretrained, without collapsed | 75.0 |  |  |  |  |  |  |  |" in table


def test_a_diverged_regression_has_the_worst_score_and_standard_json(runs):
    for seed, best in ((1, 0.13), (2, math.inf), (3, math.inf)):
        write_run(runs, "pretrained", seed, best, math.inf, task="STS-B")
    row = rows_of(runs, "STS-B")["pretrained"]
    assert row.best["seed_loss"] == Spread(math.inf, 0.13, math.inf)
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
    for name in ("report.png", "epochs.png"):
        assert (runs / name).read_bytes().startswith(b"\x89PNG")


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


def test_the_latex_table_has_medians_with_standard_errors_and_counts_collapses(runs):
    report.write_report(runs)
    lines = (runs / "report.tex").read_text().splitlines()
    assert [line for line in lines if "rule" in line] == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert lines[4] == r"weights & CoLA \\"
    values = [r["best"]["matthews"] for r in collect(runs) if r["weights"] == "pretrained"]
    error = statistics.stdev(values) / len(values) ** 0.5
    median = 100 * statistics.median(values)
    assert lines[6].startswith(rf"pretrained & {median:.1f} $\pm$ {100 * error:.1f} \\")
    assert "at most 3 seeds" in lines[-2]


def test_the_csv_has_one_line_per_number(runs):
    report.write_report(runs)
    with (runs / "report.csv").open() as file:
        lines = list(csv.DictReader(file))
    ours = next(line for line in lines if line["model"] == "pretrained")
    assert (ours["task"], ours["score"], ours["epoch"]) == ("CoLA", "accuracy", "best")
    assert (ours["median"], ours["lowest"], ours["highest"]) == ("0.75", "0.625", "0.875")
    printed = [line for line in lines if line["model"].startswith("published")]
    assert len(printed) == 8 * len(published.TASKS)
    assert sum(int(line["collapsed"]) for line in printed) == 6


def test_data_that_is_not_the_benchmark_s_is_reported(runs):
    assert "not the benchmark's" not in report.write_report(runs)
    (runs / "glue" / "CoLA").mkdir(parents=True)
    (runs / "glue" / "CoLA" / "provenance.json").write_text('{"made": "by hand"}')
    assert "The data is not the benchmark's: by hand." in report.write_report(runs)


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    assert main(["glue-report", str(tmp_path)]) == 2
    assert "has no finished run" in capsys.readouterr().err


def test_scores_beside_the_published_are_of_the_epoch_that_the_study_would_have_chosen(tmp_path):
    write_run(tmp_path, "pretrained", 1, 0.7, 0.8)
    path = next(tmp_path.glob("*/result.json"))
    result = json.loads(path.read_text())
    result["plan"]["config"] = {"best_epoch_by": "benchmark"}
    result["best"]["matthews"] = result["epochs"][0]["matthews"] = 0.5
    write_json(path, result)
    text = report.write_report(tmp_path)
    assert "| **ours**, pretrained | 80.0 |" in text
    assert "| pretrained | 50.0 |" in text
    assert "the epoch with the best Matthews correlation" in text
    with (tmp_path / "report.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["epoch"] == report.AS_PUBLISHED]
    assert (lines[0]["model"], lines[0]["median"]) == ("pretrained", "0.8")
    assert len(lines) == 2 + 8 * len(published.TASKS)


def test_the_picture_by_epoch_shows_the_benchmark_s_score_and_the_kept_epoch(runs, figures):
    picture.draw_epochs(runs, collect(runs)[:1])
    (axes,) = figures[0].axes
    curve, kept, constant, *_ = axes.lines
    assert list(curve.get_xdata()) == [1, 2]
    assert list(curve.get_ydata()) == [25.0, 12.5]  # Matthews, in per cent
    assert (list(kept.get_xdata()), list(kept.get_ydata())) == ([1], [25.0])
    assert constant.get_ydata()[0] == 0
    assert axes.get_ylabel() == "Matthews correlation, %"


@pytest.mark.parametrize(
    ("epochs", "ticks"), [(1, [1]), (3, [1, 2, 3]), (30, [1, 4, 7, 10, 13, 16, 19, 22, 25, 28])]
)
def test_epochs_are_whole_numbers_and_at_most_ten_are_named(runs, figures, epochs, ticks):
    results = collect(runs)[:1]
    scores = results[0]["epochs"][0]
    results[0]["epochs"] = [{**scores, "epoch": n} for n in range(1, epochs + 1)]
    picture.draw_epochs(runs, results)
    assert [*figures[0].axes[0].get_xticks()] == ticks


def test_no_column_beside_the_published_is_empty(runs, figures):
    write_run(runs, "pretrained", 1, 0.9, 0.9, task="WNLI")
    results = collect(runs)
    picture.draw_beside_published(runs, results)
    names = [[t.get_text() for t in axes.get_xticklabels()] for axes in figures[0].axes]
    published = ["published,\nbase", "published,\nlarge"]
    assert names == [[*published, "ours,\npretrained", "ours,\nrandom"], ["ours,\npretrained"]]


@pytest.mark.parametrize("draw", [picture.draw_beside_published, picture.draw_epochs])
def test_the_whole_legend_is_in_the_picture(runs, figures, draw):
    draw(runs, collect(runs))
    (legend,) = figures[0].legends
    inside = legend.get_window_extent()
    assert inside.x0 >= 0
    assert inside.x1 <= figures[0].bbox.x1


def test_a_model_is_checked_before_fine_tuning_where_stsb_was_run(runs, tiny_model, easy_glue):
    assert "Before fine-tuning" not in report.write_report(runs)
    write_run(runs, "pretrained", 1, 0.031, 0.04, task="STS-B")
    path = runs / "STS-B-pretrained-seed1-0" / "result.json"
    result = json.loads(path.read_text())
    result["plan"] |= {"model": str(tiny_model), "data": str(easy_glue)}
    path.write_text(json.dumps(result))
    section = report.write_report(runs).split("## Before fine-tuning")[1]
    assert "| tiny |" in section
    assert -1 <= float(section.split("| tiny | ")[1].split(" |")[0]) <= 1


def test_equal_texts_are_more_similar_than_others(tiny_model):
    texts = [f"{word} runs near the {other}" for word, other in itertools.combinations(WORDS, 2)]
    pairs = [Example((text, text), 1.0) for text in texts]
    pairs += [Example(pair, 0.0) for pair in zip(texts, texts[1:], strict=False)]
    assert similarity.correlation(tiny_model, pairs) > 0.85
