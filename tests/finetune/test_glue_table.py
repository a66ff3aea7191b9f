"""The table of tasks: published settings and scores."""

import pytest

from finetune import benchmarks, glue
from finetune.protocols import PROTOCOLS

# Learning rate, batch size, warm-up and steps in EIFY/fairseq's config/finetuning/*.yaml.
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
def test_the_published_protocol_has_the_published_settings(name):
    config = PROTOCOLS["published"].configs(benchmarks.find(name))[0]
    found = (config.learning_rate, config.batch_size, config.warmup_steps, config.schedule_steps)
    assert found == PUBLISHED[name]
    assert (config.epochs, config.weight_decay, config.gradient_clipping) == (10, 0.1, 0.0)
    assert (config.dropout, config.attention_dropout, config.head_dropout) == (0.1, 0.1, 0.0)
    assert (config.pooling, config.max_tokens, config.length_window) == ("first", 512, 1)
    assert config.best_epoch_by == "published"
    peak = max(config.rate(step, 1) for step in range(config.schedule_steps))
    assert peak == config.rate(config.warmup_steps, 1) == config.learning_rate
    assert config.rate(config.schedule_steps, 1) == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_default_protocol_clips_groups_by_length_and_warms_up_by_share(name):
    config = PROTOCOLS["default"].configs(benchmarks.find(name))[0]
    assert (config.learning_rate, config.batch_size) == PUBLISHED[name][:2]
    assert config.warmup_fraction == (0.25 if name == "QQP" else 0.06)
    assert (config.gradient_clipping, config.warmup_steps, config.schedule_steps) == (1.0, 0, 0)
    assert config.length_window > 1
    assert config.best_epoch_by == "benchmark"


def test_tasks_have_the_benchmark_s_and_the_published_scores():
    assert benchmarks.find("MNLI").score_names == ("accuracy", "accuracy_mismatched")
    assert benchmarks.find("STS-B").score_names == ("seed_loss", "pearson", "spearman")
    for task in glue.TASKS.values():
        assert set(task.official) <= set(task.score_names)
        assert task.metrics[0] == ("seed_loss" if task.is_regression else "accuracy")


@pytest.mark.parametrize(
    ("name", "benchmark"),
    [
        ("CoLA", ("matthews",)),
        ("MRPC", ("accuracy", "f1")),
        ("QQP", ("accuracy", "f1")),
        ("STS-B", ("pearson", "spearman")),
        ("MNLI", ("accuracy", "accuracy_mismatched")),
        ("RTE", ("accuracy",)),
    ],
)
def test_the_best_epoch_is_that_of_the_benchmark_s_or_of_the_published_score(name, benchmark):
    task = benchmarks.find(name)
    assert task.scores_of_best("benchmark") == benchmark
    published = "seed_loss" if name == "STS-B" else "accuracy"
    assert task.scores_of_best("published") == (published,)


@pytest.mark.parametrize(
    ("text", "name"), [("cola", "CoLA"), ("SST2", "SST-2"), ("sst-2", "SST-2"), ("stsb", "STS-B")]
)
def test_a_task_is_found_in_any_case_with_or_without_its_hyphen(text, name):
    assert benchmarks.find(text).name == name


def test_all_unknown_tasks_are_named_at_once_each_with_the_nearest():
    message = r"unknown tasks 'colla' \(did you mean CoLA\?\), 'x'; accepted: CoLA, .*, or all"
    with pytest.raises(ValueError, match=message):
        benchmarks.find_all(["colla", "rte", "x"])
    with pytest.raises(ValueError, match="cola, CoLA: name each task once"):
        benchmarks.find_all(["cola", "CoLA"])


def test_the_server_takes_eleven_files():
    names = {name or task.name for task in glue.TASKS.values() for name in task.test.values()}
    assert names == {*glue.TASKS, "MNLI-m", "MNLI-mm", "AX"} - {"MNLI"}
