"""Scores by name.

A correlation that is not defined (NaN in scipy) is 0. Warnings of sklearn and scipy are suppressed;
they all concern such cases.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
"""[N] class indices, or the numbers that a regression learns."""


def _sklearn(name: str, labels: Values, predictions: Values, **options: Any) -> float:  # noqa: ANN401
    from sklearn import metrics

    return float(getattr(metrics, name)(labels, predictions, **options))


def _correlation(name: str, labels: Values, predictions: Values) -> float:
    from scipy import stats

    if len(labels) < 2 or not np.isfinite(predictions).all():
        return 0.0
    value = float(getattr(stats, name)(labels, predictions).statistic)
    return 0.0 if math.isnan(value) else value


def _squared_error(labels: Values, predictions: Values) -> float:
    """Return the mean squared error; infinite if it is not finite."""
    error = float(np.mean((labels - predictions) ** 2))
    return error if math.isfinite(error) else math.inf


METRICS: Mapping[str, Callable[[Values, Values], float]] = {
    "accuracy": partial(_sklearn, "accuracy_score"),
    # Official for CoLA; 0 for a constant prediction.
    "matthews": partial(_sklearn, "matthews_corrcoef"),
    # Of class 1, official for MRPC and QQP; 0 if the class never occurs.
    "f1": partial(_sklearn, "f1_score", zero_division=0.0),
    "macro_f1": partial(_sklearn, "f1_score", average="macro", zero_division=0.0),
    # Both are official for STS-B. Of ties, all have their mean rank.
    "pearson": partial(_correlation, "pearsonr"),
    "spearman": partial(_correlation, "spearmanr"),
    # The published score of STS-B: that of label / 5, over ln 2. fairseq divides every loss by it,
    # as if it were an entropy in nats.
    "published_loss": lambda right, given: _squared_error(right, given) / math.log(2),
    "squared_error": _squared_error,
}
"""Each takes the labels and the predictions."""
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
