"""Collapsed runs are detected and retried."""

import dataclasses

import pytest

from finetune import benchmarks, collapse, published
from finetune.config import FinetuneConfig
from finetune.plan import RunPlan, retry_after
from finetune.protocols import PROTOCOLS

PLAN = RunPlan(
    task="CoLA",
    weights="pretrained",
    seed=1,
    model="model",
    data="glue",
    model_sha256="a",
    data_sha256="b",
    config=FinetuneConfig(),
)


@pytest.mark.parametrize(
    ("best", "answers", "expected"),
    [
        (0.70, 2, ""),
        (0.69, 2, "no better than a constant"),
        (0.60, 2, "no better than a constant"),
        (0.70, 1, "always the same answer"),
    ],
)
def test_a_classifier_has_collapsed_if_it_is_no_better_than_the_majority_or_constant(
    best, answers, expected
):
    assert collapse.reason("accuracy", {"accuracy": best}, {"accuracy": 0.69}, answers) == expected


@pytest.mark.parametrize(
    ("loss", "answers", "expected"),
    [
        (0.03, 900, ""),
        (0.123, 900, "no better than a constant"),
        (0.2, 900, "no better than a constant"),
        (float("inf"), 900, "no better than a constant"),
        (0.13, 1, "always the same answer"),
    ],
)
def test_a_regression_that_explains_almost_no_variance_has_collapsed(loss, answers, expected):
    found = collapse.reason("seed_loss", {"seed_loss": loss}, {"seed_loss": 0.13}, answers)
    assert found == expected


def test_published_scores_no_better_than_a_constant_are_marked():
    marked = {
        (model, task)
        for model, scores in published.table().items()
        for task, value in scores.items()
        if published.looks_collapsed(task, value)
    }
    assert marked == {
        *(("large alibi", task) for task in ("CoLA", "MRPC", "RTE", "STS-B")),
        *(("large zero-clap", task) for task in ("CoLA", "RTE")),
    }


def test_a_collapsed_run_is_retried_up_to_the_limit_with_another_seed_and_a_longer_warm_up():
    plan, seeds = PLAN, {PLAN.training_seed}
    fractions = [PLAN.training_config(8000).warmup_fraction]
    while following := retry_after(plan, {"collapsed": "always the same answer"}, 4):
        plan = following
        seeds.add(plan.training_seed)
        fractions.append(plan.training_config(8000).warmup_fraction)
    assert plan.name == "CoLA-pretrained-seed1-retry4"
    assert len(seeds) == 5
    assert fractions == pytest.approx([0.06, 0.12, 0.24, 0.48, 0.5])
    assert PLAN.differences(plan) == []


def test_a_retry_doubles_a_warm_up_in_steps_and_adds_one_if_there_is_none():
    assert FinetuneConfig(warmup_steps=100).steadier(2, 1000).warmup_steps == 400
    assert FinetuneConfig(warmup_fraction=0.0).steadier(1, 1000).warmup_fraction == 0.12


def test_the_warm_up_of_a_retry_is_at_most_half_of_the_steps():
    """Regression test: in the second retry of the published QQP it was the whole run."""
    config, examples = PROTOCOLS["published"].configs(benchmarks.find("QQP"))[0], 363_846
    plan = dataclasses.replace(PLAN, config=config)
    warm_ups = [
        dataclasses.replace(plan, retry=retry).training_config(examples).warmup_steps
        for retry in range(4)
    ]
    assert warm_ups == [28318, 56636, 56636, 56636]
    short = FinetuneConfig(warmup_steps=100, schedule_steps=1000)
    assert short.steadier(3, 600).warmup_steps == 300
    assert short.steadier(3, 5000).warmup_steps == 500


@pytest.mark.parametrize(
    "config", [FinetuneConfig(warmup_steps=800), FinetuneConfig(warmup_fraction=0.8)]
)
def test_a_retry_does_not_warm_up_for_less_long_than_the_first_run(config):
    rates = [config.steadier(1, 1000).rate(step, 1000) for step in range(1000)]
    assert rates == [config.rate(step, 1000) for step in range(1000)]


@pytest.mark.parametrize(
    ("examples", "limit", "due"),
    [(600, None, False), (600, 1, True), (1000, None, True), (1000, 0, False)],
)
def test_a_small_trial_is_retried_only_if_the_user_asks_for_it(examples, limit, due):
    result = {"collapsed": "always the same answer", "train_examples": examples}
    assert bool(retry_after(PLAN, result, limit)) == due


@pytest.mark.parametrize(
    ("weights", "collapsed", "limit"),
    [("random", "always the same answer", 2), ("pretrained", "", 2), ("pretrained", "x", 0)],
)
def test_other_runs_are_not_retried(weights, collapsed, limit):
    plan = dataclasses.replace(PLAN, weights=weights)
    assert retry_after(plan, {"collapsed": collapsed}, limit) is None
