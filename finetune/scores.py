"""Scores of predictions against labels, each with its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]


def accuracy(labels: Labels, predictions: Labels) -> float:
    """Share of the predictions that are right."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def matthews(labels: Labels, predictions: Labels) -> float:
    """Matthews correlation, the official score of CoLA: 0 for any constant prediction."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


METRICS: Mapping[str, Callable[[Labels, Labels], float]] = MappingProxyType(
    {"accuracy": accuracy, "matthews": matthews}
)


def score(names: Sequence[str], labels: Labels, predictions: Labels) -> dict[str, float]:
    """The named scores of some predictions."""
    return {name: METRICS[name](labels, predictions) for name in names}


def majority(names: Sequence[str], labels: Labels) -> dict[str, float]:
    """The named scores of always answering these labels' most frequent class.

    No constant answer is more accurate: a model that scores no better has learned nothing.
    """
    most_frequent = np.bincount(labels).argmax()
    return score(names, labels, np.full_like(labels, most_frequent))
