"""Tasks and their scores, collapsed runs, settings, and the protocols of the studies."""

import dataclasses
import math

import numpy as np
import pytest

from finetune import scores, tasks
from finetune.config import FinetuneConfig
from finetune.protocols import PROTOCOLS
from finetune.tasks import TASKS, Task, has_collapsed

# Learning rate, batch size, warm-up and steps in EIFY/fairseq's config/finetuning/*.yaml, and in
# fairseq's examples/roberta/README.glue.md.
PUBLISHED = {
    "CoLA": (1e-5, 16, 320, 5336),
    "MNLI": (1e-5, 32, 7432, 123873),
    "MRPC": (1e-5, 16, 137, 2296),
    "QNLI": (1e-5, 32, 1986, 33112),
    "QQP": (1e-5, 32, 28318, 113272),
    "RTE": (2e-5, 16, 122, 2036),
    "SST-2": (1e-5, 32, 1256, 20935),
    "STS-B": (2e-5, 16, 214, 3598),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_studies_have_fairseq_s_settings_and_the_default_clips_and_groups_by_length(name):
    for protocol, best in (("published", "published"), ("roberta", "benchmark")):
        config = PROTOCOLS[protocol].config(TASKS[name])
        warmup = round(config.warmup_fraction * config.schedule_steps)
        found = config.learning_rate, config.batch_size, warmup, config.schedule_steps
        assert found == PUBLISHED[name]
        assert (config.epochs, config.weight_decay, config.gradient_clipping) == (10, 0.1, 0.0)
        assert (config.dropout, config.attention_dropout, config.head_dropout) == (0.1, 0.1, 0.0)
        assert (config.pooling, config.max_tokens, config.length_window) == ("first", 512, 1)
        assert (config.best_epoch_by, config.start_from) == (best, "")
        peak = max(config.rate(step, 1) for step in range(config.schedule_steps))
        assert peak == config.rate(warmup, 1) == config.learning_rate
        assert config.rate(config.schedule_steps, 1) == 0
    config = PROTOCOLS["default"].config(TASKS[name])
    assert (config.learning_rate, config.batch_size) == PUBLISHED[name][:2]
    assert config.warmup_fraction == (0.25 if name == "QQP" else 0.06)
    assert (config.gradient_clipping, config.schedule_steps) == (1.0, 0)
    assert (config.length_window > 1, config.best_epoch_by) == (True, "benchmark")


def test_a_task_of_one_s_own_has_no_study_s_settings_and_overrides_have_the_setting_s_type():
    config = PROTOCOLS["default"].config(Task("QQP"), ["epochs=3", "pooling=mean"])
    assert config == FinetuneConfig(
        epochs=3, learning_rate=2e-5, pooling="mean", best_epoch_by="benchmark"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rat=1e-4", "did you mean 'learning_rate'"),
        ("epochs", "write section.key=value"),
        ("dropout=1", "must be below 1"),
        ("epochs=0", "must be above 0"),
        ("pooling=max", "must be one of first or mean"),
        ("max_tokens=5", "must be 6 or above"),
        ("max_train_examples=-1", "must be 0 or above"),
        ("length_window=0", "must be above 0"),
        ("best_epoch_by=f1", "must be one of benchmark or published"),
    ],
)
def test_bad_settings_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        PROTOCOLS["published"].config(Task("own"), [override])


def test_the_learning_rate_rises_and_then_falls_to_zero():
    config = FinetuneConfig(learning_rate=1.0, warmup_fraction=0.1)
    rates = [config.rate(step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 101)])
    assert FinetuneConfig(learning_rate=1.0, warmup_fraction=0.0).rate(0, 5) == 1.0
    config = FinetuneConfig(learning_rate=1.0, warmup_fraction=0.5, schedule_steps=8)
    rates = [config.rate(step, 10) for step in range(10)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0, 0])


def test_each_study_reports_its_own_score_of_a_run_in_the_epoch_where_it_is_best():
    epochs = [{"accuracy": 0.7, "matthews": 0.5}, {"accuracy": 0.8, "matthews": 0.4}]
    found = {name: p.score({"epochs": epochs}, TASKS["CoLA"]) for name, p in PROTOCOLS.items()}
    assert found == {"default": 0.8, "published": 0.8, "roberta": 0.5}


def test_tasks_have_the_benchmark_s_and_the_published_scores():
    assert TASKS["MNLI"].score_names == ("accuracy", "accuracy_mismatched")
    assert TASKS["STS-B"].score_names == ("published_loss", "pearson", "spearman")
    for task in TASKS.values():
        assert set(task.official) <= set(task.score_names)
        assert task.metrics[0] == ("published_loss" if task.is_regression else "accuracy")


def test_a_task_is_found_in_any_case_with_or_without_its_hyphen():
    found = tasks.find(["cola", "SST2", "Sts-b"])
    assert [task.name for task in found] == ["CoLA", "SST-2", "STS-B"]
    assert tasks.find(["all"]) == [*TASKS.values()]
    for names, message in (
        (["colla", "rte", "x"], r"unknown tasks 'colla' \(did you mean CoLA\?\), 'x'; accepted: "),
        (["cola", "CoLA"], "cola, CoLA: name each task once"),
        (["all", "CoLA"], "task 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            tasks.find(names)


@pytest.mark.parametrize(
    ("task", "given", "expected"),
    [
        ("CoLA", [1, 1, 1, 1], True),
        ("CoLA", [0, 0, 0, 0], True),
        ("CoLA", [0, 0, 0, 1], False),  # less accurate than always 1
        ("STS-B", [0.5, 0.5, 0.5, 0.5], True),
        ("STS-B", [0.5, 0.51, 0.5, 0.51], True),
        ("STS-B", [0.5, 0.6, 0.5, 0.6], False),
        ("STS-B", [0.1, math.nan, 0.3, 0.9], True),
        ("STS-B", [0.1, math.inf, 0.3, 0.9], True),
    ],
)
def test_a_run_has_collapsed_if_its_answers_are_alike(task, given, expected):
    labels = tasks.truth(TASKS[task], [0, 1, 1, 1])
    assert has_collapsed(TASKS[task], labels, np.array(given, labels.dtype)) is expected


NAN, BOTH = math.nan, ("pearson", "spearman")


@pytest.mark.parametrize(
    ("labels", "predictions", "expected"),
    [
        (  # 4 true positives, 1 false negative, 2 false positives, 3 true negatives.
            [1] * 5 + [0] * 5,
            [1, 1, 1, 1, 0, 1, 1, 0, 0, 0],
            {"accuracy": 0.7, "matthews": (4 * 3 - 2 * 1) / math.sqrt(6 * 5 * 5 * 4), "f1": 8 / 11},
        ),
        ([0.0, 1, 2], [0.0, 1, 10], {"pearson": 10 / math.sqrt(2 * 182 / 3), "spearman": 1.0}),
        ([1, 0], [0, 0], {"matthews": 0.0, "f1": 0.0}),
        # A correlation that is not defined is zero.
        ([0.1, 0.5, 0.9], [0.4, 0.4, 0.4], dict.fromkeys(BOTH, 0.0)),
        ([0.5, 0.5], [0.1, 0.9], dict.fromkeys(BOTH, 0.0)),
        ([0.5], [0.5], dict.fromkeys(BOTH, 0.0)),
        ([0.1, 0.5], [0.1, math.inf], dict.fromkeys(BOTH, 0.0)),
        # The published loss is the squared error over ln 2.
        ([0.2, 0.8], [0.3, 0.6], {"published_loss": (0.01 + 0.04) / 2 / math.log(2)}),
        ([0.2, 0.8], [0.2, NAN], {"published_loss": math.inf}),
    ],
)
def test_scores_agree_with_their_definitions_without_warnings(labels, predictions, expected):
    found = scores.score([*expected], np.array(labels), np.array(predictions))
    assert found == pytest.approx(expected)


def test_the_squared_error_of_a_task_of_one_s_own_is_in_the_units_of_its_files():
    task = Task("own", "regression", metrics=("pearson", "squared_error"), scale=10.0)
    right, given = np.array([[0.1, 0.5], [0.3, 0.5]], dtype=np.float32)
    found = tasks.score(task, "test", right, given)
    assert found == pytest.approx({"pearson_test": 1.0, "squared_error_test": 2.0})
    huge = dataclasses.replace(task, scale=1e200)  # its square is beyond a float
    assert tasks.score(huge, "dev", right, given)["squared_error"] == math.inf


def test_no_constant_beats_the_majority_or_the_mean():
    labels, names = np.array([1, 0, 1, 1, 0]), ("accuracy", "matthews")
    best = scores.score(names, labels, tasks.constant(Task("x"), labels))
    assert best == pytest.approx({"accuracy": 0.6, "matthews": 0.0})
    assert scores.METRICS["accuracy"](labels, np.zeros_like(labels)) == pytest.approx(0.4)
    labels = np.array([0.0, 0.2, 1.0, 0.6], dtype=np.float32)
    mean = tasks.constant(Task("x", "regression"), labels)
    for guess in np.linspace(0, 1, 11, dtype=np.float32):
        loss = scores.METRICS["published_loss"]
        assert loss(labels, np.full_like(labels, guess)) >= loss(labels, mean) - 1e-6


def test_the_best_epoch_has_the_best_mean_score_or_lowest_loss_and_is_the_first_of_equals():
    epochs = [
        {"epoch": n, "accuracy": a, "published_loss": a, "f1": 0.6 - 0.2 * n}
        for n, a in enumerate((0.5, 0.7, 0.7, 0.4))
    ]
    assert scores.best(epochs, ["accuracy"])["epoch"] == 1
    assert scores.best(epochs, ["published_loss"])["epoch"] == 3
    assert scores.best(epochs[::2], ["accuracy", "f1"])["epoch"] == 0
