"""The paired bootstrap between two models, and the predictions that it reads."""

import dataclasses
import json

import numpy as np
import pytest

from data_prep.common.files import write_json
from finetune import benchmarks, comparison, report
from finetune.__main__ import main
from finetune.comparison import compare
from finetune.task import Task

RTE = benchmarks.find("RTE")


def answers(truth, accuracy, seed):
    """Answers of which this share is right, at random places."""
    wrong = np.random.default_rng(seed).random(len(truth)) >= accuracy
    return {"dev": (truth, np.where(wrong, 1 - truth, truth))}


def truth(examples=400):
    return np.random.default_rng(9).integers(2, size=examples)


def test_a_large_difference_is_found_and_the_other_way_round_has_the_opposite_sign():
    good = [answers(truth(), 0.9, seed) for seed in (1, 2, 3)]
    bad = [answers(truth(), 0.7, seed) for seed in (4, 5, 6)]
    found, reverse = compare(RTE, good, bad), compare(RTE, bad, good)
    assert found.seeds == 3
    assert found.low < found.ours - found.theirs < found.high
    assert found.low > 0.1
    assert found.p_value == reverse.p_value == 2 / comparison.RESAMPLES
    assert (reverse.low, reverse.high) == pytest.approx((-found.high, -found.low))


def test_a_model_does_not_differ_from_itself():
    runs = [answers(truth(), 0.8, seed) for seed in (1, 2)]
    assert compare(RTE, runs, runs) == comparison.Difference(
        2, compare(RTE, runs, runs).ours, compare(RTE, runs, runs).ours, 0.0, 0.0, 1.0
    )


def test_equally_good_models_seldom_differ_at_the_level_of_five_per_cent():
    values = [
        compare(RTE, [answers(truth(100), 0.8, 2 * n)], [answers(truth(100), 0.8, 2 * n + 1)])
        for n in range(20)
    ]
    assert sum(found.p_value < 0.05 for found in values) <= 4  # expected 1
    assert sum(found.p_value < 0.5 for found in values) >= 5  # expected 10


def test_pairs_make_a_small_difference_significant_that_is_none_without_them():
    """The better model is right wherever the other one is, and in eight more places."""
    right = truth(200)
    (_, worse) = answers(right, 0.7, 1)["dev"]
    better = worse.copy()
    gained = np.flatnonzero(worse != right)[:8]
    better[gained] = right[gained]
    found = compare(RTE, [{"dev": (right, better)}], [{"dev": (right, worse)}])
    assert found.ours - found.theirs == pytest.approx(0.04)
    assert found.p_value < 0.01


def test_a_difference_that_one_seed_of_two_has_is_less_certain_than_one_that_both_have():
    lucky = [answers(truth(), 0.9, 1), answers(truth(), 0.7, 2)]
    steady = [answers(truth(), 0.8, 3), answers(truth(), 0.8, 4)]
    other = [answers(truth(), 0.7, 5), answers(truth(), 0.7, 6)]
    widths = [found.high - found.low for found in (compare(RTE, a, other) for a in (lucky, steady))]
    assert widths[0] > 1.5 * widths[1]


def test_the_score_is_the_mean_of_the_official_ones_over_all_dev_splits():
    mnli = benchmarks.find("MNLI")
    run = {"dev_matched": (truth(), truth()), "dev_mismatched": (truth(50), 1 - truth(50))}
    assert compare(mnli, [run], [run]).ours == 0.5


@pytest.mark.parametrize(
    ("task", "truth", "answers"),
    [
        (RTE, np.array([0, 1]), np.array([1, 1])),
        (benchmarks.find("STS-B"), np.array([0.5, 1], "f4"), np.array([np.nan, np.inf], "f4")),
        (Task("own", "multi-label"), np.array([[True, False]]), np.array([[True, True]])),
        (Task("own", "tags"), [["O", "B-X"], ["O"]], [["O", "O"], ["O"]]),
        (Task("own", "spans"), [("a", "b"), ("",)], ["a", ""]),
    ],
)
def test_predictions_of_each_kind_are_read_as_they_were_written(tmp_path, task, truth, answers):
    comparison.write(tmp_path, {"dev": (truth, answers)})
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert len([json.loads(line, parse_constant=pytest.fail) for line in lines]) == 1
    found = comparison.read_predictions(tmp_path, task)["dev"]
    finite = [np.nan_to_num(x, posinf=0) if isinstance(x, np.ndarray) else x for x in found]
    for read, written in zip(finite, (truth, answers), strict=True):
        if isinstance(written, np.ndarray):
            assert np.array_equal(read, np.nan_to_num(written, posinf=0))
        else:
            assert [list(x) for x in read] == [list(x) for x in written]


def runs(folder, accuracy, seeds=(1, 2), protocol="default", examples=300, task="RTE"):
    for seed in seeds:
        run = folder / f"{task}-pretrained-seed{seed}"
        run.mkdir(parents=True)
        found = answers(truth(examples), accuracy, seed + round(1000 * accuracy))
        comparison.write(run, found)
        scores = {"epoch": 1, "accuracy": float((found["dev"][0] == found["dev"][1]).mean())}
        result = {
            "plan": {
                "model": "m",
                "data": "d",
                "protocol": protocol,
                "config": {"best_epoch_by": "benchmark"},
            },
            **{"task": task, "weights": "pretrained", "seed": seed, "retry": 0, "collapsed": ""},
            **{"best": scores, "last": scores, "epochs": [scores], "majority": {"accuracy": 0.5}},
            **{"train_examples": 9, "dev_examples": 9, "seconds": 1.0, "tokens_per_second": 1.0},
            "device": "cpu",
        }
        write_json(run / "result.json", result)
    return folder


def test_the_report_compares_two_folders(tmp_path, capsys):
    ours, theirs = runs(tmp_path / "a", 0.9), runs(tmp_path / "b", 0.6, seeds=(2, 1, 7))
    assert main(["glue-report", str(ours), "--against", str(theirs)]) == 0
    section = capsys.readouterr().out.split(f"## Compared with {theirs}\n")[1]
    (row,) = [line for line in section.splitlines() if line.startswith("| RTE | 2 |")]
    assert row.endswith("at most 0.002 |")
    assert "Compared with" in (ours / "report.md").read_text()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seeds": (8, 9)}, "has no task and seed that"),
        ({"task": "WNLI"}, "has no task and seed that"),
        ({"examples": 200}, "RTE: the models were scored on different examples"),
        ({"protocol": "roberta"}, "has protocol roberta, .* has default"),
    ],
)
def test_what_is_not_paired_is_refused(tmp_path, other, message):
    ours, theirs = runs(tmp_path / "a", 0.9), runs(tmp_path / "b", 0.6, **other)
    with pytest.raises(ValueError, match=message):
        report.write_report(ours, theirs)


def test_a_run_without_predictions_is_named(tmp_path):
    ours, theirs = runs(tmp_path / "a", 0.9), runs(tmp_path / "b", 0.6)
    (theirs / "RTE-pretrained-seed1" / "predictions.jsonl").unlink()
    with pytest.raises(ValueError, match=r"b/RTE-pretrained-seed1: has no predictions\.jsonl"):
        report.write_report(ours, theirs)
    with pytest.raises(ValueError, match="has no finished run"):
        report.write_report(ours, tmp_path / "none")


def test_the_predictions_of_a_run_give_its_best_score(run_ranks, tiny_model, easy_glue, tmp_path):
    from finetune import planning, train

    (plan,) = planning.plan_runs(
        tiny_model, str(easy_glue), [RTE], ["pretrained"], [1], ["epochs=2", "pooling=mean"]
    )
    plan.write(tmp_path / plan.name)
    (result,) = run_ranks(1, lambda: train.train(plan, tmp_path / plan.name))
    found = comparison.read_predictions(tmp_path / plan.name, RTE)
    assert compare(RTE, [found], [found]).ours == result["best"]["accuracy"]
    assert dataclasses.asdict(plan)["protocol"] == "default"
