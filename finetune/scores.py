"""Scores by name.

A correlation that is not defined (NaN in scipy) is 0. Warnings of sklearn and scipy are suppressed;
they all concern such cases.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
"""[N] class indices, or the numbers that a regression learns."""


def accuracy(labels: Values, predictions: Values) -> float:
    """Return the share of correct predictions."""
    return float(np.equal(labels, predictions).mean())


def matthews(labels: Values, predictions: Values) -> float:
    """Return the Matthews correlation (official for CoLA); 0 for a constant prediction."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def f1(labels: Values, predictions: Values, average: str = "binary") -> float:
    """Return the F1 of class 1 (official for MRPC and QQP); 0 if the class never occurs."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average=average, zero_division=0.0))


def pearson(labels: Values, predictions: Values) -> float:
    """Return the Pearson correlation (official for STS-B)."""
    return _correlation("pearsonr", labels, predictions)


def spearman(labels: Values, predictions: Values) -> float:
    """Return the Spearman correlation (official for STS-B); ties share their mean rank."""
    return _correlation("spearmanr", labels, predictions)


def published_loss(labels: Values, predictions: Values) -> float:
    """Return the published score of STS-B: the mean squared error of label / 5, over ln 2.

    fairseq divides every loss by ln 2, as if it were an entropy in nats. Infinite if it is not
    finite.
    """
    return squared_error(labels, predictions) / math.log(2)


def squared_error(labels: Values, predictions: Values) -> float:
    """Return the mean squared error; infinite if it is not finite."""
    error = float(np.mean((labels - predictions) ** 2))
    return error if math.isfinite(error) else math.inf


def macro_f1(labels: Values, predictions: Values) -> float:
    """Return the mean of the labels' F1."""
    return f1(labels, predictions, "macro")


def _correlation(name: str, labels: Values, predictions: Values) -> float:
    from scipy import stats

    if len(labels) < 2 or not np.isfinite(predictions).all():
        return 0.0
    value = float(getattr(stats, name)(labels, predictions).statistic)
    return 0.0 if math.isnan(value) else value


_METRICS = (accuracy, matthews, f1, macro_f1, pearson, spearman, published_loss, squared_error)
METRICS: Mapping[str, Callable[..., float]] = {each.__name__: each for each in _METRICS}
LOWER_IS_BETTER = frozenset({"published_loss", "squared_error"})


def score(names: Sequence[str], labels: Values, predictions: Values) -> dict[str, float]:
    """Return scores by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: METRICS[name](labels, predictions) for name in names}


def mean(values: Mapping[str, float], names: Sequence[str]) -> float:
    """Return the mean of the scores of these names."""
    return statistics.fmean(values[name] for name in names)


def best(epochs: Sequence[Mapping[str, float]], names: Sequence[str]) -> Mapping[str, float]:
    """Return the first epoch with the best mean of the scores of these names."""
    sign = -1 if LOWER_IS_BETTER.issuperset(names) else 1
    return max(epochs, key=lambda epoch: sign * mean(epoch, names))
