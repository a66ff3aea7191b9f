"""Scores agree with their definitions, also in edge cases, without warnings."""

import math

import numpy as np
import pytest

from finetune import scores, tasks
from finetune.tasks import Task

CLASSES = ("accuracy", "matthews", "f1")
NUMBERS = ("published_loss", "pearson", "spearman")


def test_scores_of_a_known_confusion_matrix():
    # 4 true positives, 1 false negative, 2 false positives, 3 true negatives.
    labels = np.array([1] * 5 + [0] * 5)
    predictions = np.array([1, 1, 1, 1, 0, 1, 1, 0, 0, 0])
    expected = (4 * 3 - 2 * 1) / np.sqrt((4 + 2) * (4 + 1) * (3 + 2) * (3 + 1))
    values = scores.score(CLASSES, labels, predictions)
    assert values == {
        "accuracy": pytest.approx(0.7),
        "matthews": pytest.approx(expected),
        "f1": pytest.approx(8 / 11),
    }


@pytest.mark.parametrize(
    ("labels", "predictions"),
    [
        ([0.1, 0.5, 0.9], [0.4, 0.4, 0.4]),
        ([0.5, 0.5], [0.1, 0.9]),
        ([0.5], [0.5]),
        ([0.1, 0.5], [math.nan, 0.5]),
    ],
)
def test_an_undefined_correlation_is_zero(labels, predictions):
    values = scores.score(
        ("pearson", "spearman"), np.array(labels, np.float32), np.array(predictions, np.float32)
    )
    assert values == {"pearson": 0.0, "spearman": 0.0}


def test_a_rank_correlation_is_of_ranks():
    values = scores.score(("pearson", "spearman"), np.array([0.0, 1, 2]), np.array([0.0, 1, 10]))
    assert values == {"pearson": pytest.approx(10 / math.sqrt(2 * 182 / 3)), "spearman": 1.0}


def test_the_published_loss_is_the_squared_error_over_ln_2():
    labels, predictions = np.array([0.2, 0.8]), np.array([0.3, 0.6])
    expected = (0.01 + 0.04) / 2 / math.log(2)
    assert scores.published_loss(labels, predictions) == pytest.approx(expected)
    assert scores.published_loss(labels, np.array([0.2, math.nan])) == math.inf


@pytest.mark.parametrize("constant", [0, 1])
def test_no_constant_beats_the_majority(constant):
    labels = np.array([1, 0, 1, 1, 0])
    value = scores.score(CLASSES, labels, np.full_like(labels, constant))
    best = scores.score(CLASSES, labels, tasks.constant(Task("x"), labels))
    assert value["accuracy"] <= best["accuracy"] == pytest.approx(0.6)
    assert value["matthews"] == best["matthews"] == 0.0


def test_no_constant_has_a_lower_error_than_the_mean():
    labels = np.array([0.0, 0.2, 1.0, 0.6], dtype=np.float32)
    best = scores.score(NUMBERS, labels, tasks.constant(Task("x", "regression"), labels))
    assert best == {"published_loss": best["published_loss"], "pearson": 0.0, "spearman": 0.0}
    for guess in np.linspace(0, 1, 11, dtype=np.float32):
        loss = scores.published_loss(labels, np.full_like(labels, guess))
        assert loss >= best["published_loss"] - 1e-6


def test_the_best_epoch_is_the_first_of_equals_and_the_lowest_for_a_loss():
    epochs = [
        {"epoch": n, "accuracy": a, "published_loss": a} for n, a in enumerate((0.5, 0.7, 0.7, 0.4))
    ]
    assert scores.best(epochs, ["accuracy"])["epoch"] == 1
    assert scores.best(epochs, ["published_loss"])["epoch"] == 3


def test_the_best_epoch_has_the_best_mean_of_several_scores():
    epochs = [{"accuracy": 0.7, "f1": 0.5}, {"accuracy": 0.65, "f1": 0.6}]
    assert scores.best(epochs, ["accuracy"]) == epochs[0]
    assert scores.best(epochs, ["accuracy", "f1"]) == epochs[1]
