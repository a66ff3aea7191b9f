"""Scores agree with their definitions, and the majority class's are the best constant's."""

import numpy as np
import pytest

from finetune import scores

NAMES = ("accuracy", "matthews")


def test_scores_of_a_hand_made_confusion():
    # 4 true positives, 1 false negative, 2 false positives, 3 true negatives.
    labels = np.array([1] * 5 + [0] * 5)
    predictions = np.array([1, 1, 1, 1, 0, 1, 1, 0, 0, 0])
    expected = (4 * 3 - 2 * 1) / np.sqrt((4 + 2) * (4 + 1) * (3 + 2) * (3 + 1))
    values = scores.score(NAMES, labels, predictions)
    assert values == {"accuracy": pytest.approx(0.7), "matthews": pytest.approx(expected)}


def test_opposite_answers_correlate_negatively():
    labels = np.array([0, 1, 1, 0, 1])
    assert scores.matthews(labels, labels) == pytest.approx(1.0)
    assert scores.matthews(labels, 1 - labels) == pytest.approx(-1.0)


@pytest.mark.parametrize("constant", [0, 1])
def test_no_constant_beats_the_majority(constant):
    labels = np.array([1, 0, 1, 1, 0])
    value = scores.score(NAMES, labels, np.full_like(labels, constant))
    best = scores.majority(NAMES, labels)
    assert value["accuracy"] <= best["accuracy"] == pytest.approx(0.6)
    assert value["matthews"] == best["matthews"] == 0.0
