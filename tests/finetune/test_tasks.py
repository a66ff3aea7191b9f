"""GLUE's tasks, collapsed runs, and the settings and reported scores of the protocols."""

import argparse

import pytest

from finetune import command, tasks
from finetune.protocols import PROTOCOLS
from finetune.tasks import TASKS, collapse

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
@pytest.mark.parametrize(
    ("protocol", "best"), [("published", "published"), ("roberta", "benchmark")]
)
def test_the_studies_have_fairseq_s_settings(protocol, best, name):
    config = PROTOCOLS[protocol].config(TASKS[name])
    found = (config.learning_rate, config.batch_size, config.warmup_steps, config.schedule_steps)
    assert found == PUBLISHED[name]
    assert (config.epochs, config.weight_decay, config.gradient_clipping) == (10, 0.1, 0.0)
    assert (config.dropout, config.attention_dropout, config.head_dropout) == (0.1, 0.1, 0.0)
    assert (config.pooling, config.max_tokens, config.length_window) == ("first", 512, 1)
    assert (config.best_epoch_by, config.start_from) == (best, "")
    peak = max(config.rate(step, 1) for step in range(config.schedule_steps))
    assert peak == config.rate(config.warmup_steps, 1) == config.learning_rate
    assert config.rate(config.schedule_steps, 1) == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_default_protocol_clips_groups_by_length_and_warms_up_by_share(name):
    config = PROTOCOLS["default"].config(TASKS[name])
    assert (config.learning_rate, config.batch_size) == PUBLISHED[name][:2]
    assert config.warmup_fraction == (0.25 if name == "QQP" else 0.06)
    assert (config.gradient_clipping, config.warmup_steps, config.schedule_steps) == (1.0, 0, 0)
    assert config.length_window > 1
    assert config.best_epoch_by == "benchmark"


def test_a_task_of_one_s_own_has_no_study_s_settings():
    config = PROTOCOLS["default"].config(tasks.Task("QQP"), ["epochs=3"])
    assert (config.learning_rate, config.batch_size, config.epochs) == (2e-5, 16, 3)


def test_the_command_offers_every_protocol():
    parser = argparse.ArgumentParser()
    command._glue_arguments(parser)
    offered = {action.dest: action.choices for action in parser._actions}
    assert offered["protocol"] == tuple(PROTOCOLS)


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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["colla", "rte", "x"], r"unknown tasks 'colla' \(did you mean CoLA\?\), 'x'; accepted: "),
        (["cola", "CoLA"], "cola, CoLA: name each task once"),
        (["all", "CoLA"], "task 'all'"),
    ],
)
def test_names_that_are_not_tasks_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        tasks.find(names)


@pytest.mark.parametrize(
    ("metric", "best", "answers", "expected"),
    [
        ("accuracy", 0.70, 2, ""),
        ("accuracy", 0.69, 2, "no better than a constant"),
        ("accuracy", 0.70, 1, "always the same answer"),
        ("published_loss", 0.03, 900, ""),
        ("published_loss", 0.123, 900, "no better than a constant"),
        ("published_loss", float("inf"), 900, "no better than a constant"),
        ("published_loss", 0.13, 1, "always the same answer"),
    ],
)
def test_a_run_has_collapsed_if_it_is_no_better_than_a_constant_answer(
    metric, best, answers, expected
):
    """A regression, if it explains less than a tenth of the labels' variance."""
    constant = {"accuracy": 0.69, "published_loss": 0.13}
    assert collapse(metric, {metric: best}, constant, answers) == expected
