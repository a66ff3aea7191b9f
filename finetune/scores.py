"""Scores by name: those of GLUE, of labelled words (seqeval) and of answers in a text (SQuAD).

A correlation that is not defined (NaN in scipy) is 0. Warnings of sklearn and scipy are suppressed;
they all concern such cases.
"""

from __future__ import annotations

import math
import re
import statistics
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
"""[N] class indices, or the numbers that a regression learns."""


def accuracy(labels: Values, predictions: Values) -> float:
    """Return the share of correct predictions; of several labels, of which all are correct.

    The bootstrap calls it thousands of times, for which sklearn's checks take too long.
    """
    right = np.equal(labels, predictions)
    return float(right.reshape(len(right), -1).all(axis=1).mean())


def matthews(labels: Values, predictions: Values) -> float:
    """Return the Matthews correlation (official for CoLA); 0 for a constant prediction."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def f1(labels: Values, predictions: Values) -> float:
    """Return the F1 of class 1 (official for MRPC and QQP); 0 if the class never occurs."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0.0))


def pearson(labels: Values, predictions: Values) -> float:
    """Return the Pearson correlation (official for STS-B)."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, labels, predictions)


def spearman(labels: Values, predictions: Values) -> float:
    """Return the Spearman correlation (official for STS-B); ties share their mean rank."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, labels, predictions)


def seed_loss(labels: Values, predictions: Values) -> float:
    """Return the published score of STS-B: the mean squared error of label / 5, over ln 2.

    fairseq divides every loss by ln 2, as if it were an entropy in nats. Infinite if it is not
    finite.
    """
    error = float(np.mean((labels - predictions) ** 2)) / math.log(2)
    return error if math.isfinite(error) else math.inf


def squared_error(labels: Values, predictions: Values) -> float:
    """Return the mean squared error, in units of `Task.scale`; infinite if it is not finite."""
    error = float(np.mean((labels - predictions) ** 2))
    return error if math.isfinite(error) else math.inf


def micro_f1(labels: Values, predictions: Values) -> float:
    """Return the F1 over all labels of all examples."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="micro", zero_division=0.0))


def macro_f1(labels: Values, predictions: Values) -> float:
    """Return the mean of the labels' F1."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="macro", zero_division=0.0))


Tags = Sequence[Sequence[str]]
"""The tag of each word of each sentence, such as B-PER, I-PER and O."""


def entity_f1(labels: Tags, predictions: Tags) -> float:
    """Return the F1 of whole entities, as seqeval (Nakayama 2018) and CoNLL's script count them."""
    from seqeval.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0))


def entity_precision(labels: Tags, predictions: Tags) -> float:
    """Return the share of found entities that are right."""
    from seqeval.metrics import precision_score

    return float(precision_score(labels, predictions, zero_division=0))


def entity_recall(labels: Tags, predictions: Tags) -> float:
    """Return the share of entities that were found."""
    from seqeval.metrics import recall_score

    return float(recall_score(labels, predictions, zero_division=0))


def tag_accuracy(labels: Tags, predictions: Tags) -> float:
    """Return the share of words with the right tag."""
    pairs = [
        pair for own in zip(labels, predictions, strict=True) for pair in zip(*own, strict=True)
    ]
    return statistics.fmean(right == found for right, found in pairs)


Answers = Sequence[Sequence[str]]
"""The right answers to each question; ("",) where the text has none."""


def exact_match(labels: Answers, predictions: Sequence[str]) -> float:
    """Return the share of answers that equal a right one, normalised (Rajpurkar et al. 2016)."""
    return _best_of_answers(labels, predictions, lambda right, found: float(right == found))


def overlap_f1(labels: Answers, predictions: Sequence[str]) -> float:
    """Return the mean F1 of the words of each answer and the right one that is nearest to it."""
    return _best_of_answers(labels, predictions, _words_f1)


def _best_of_answers(
    labels: Answers,
    predictions: Sequence[str],
    compare: Callable[[list[str], list[str]], float],
) -> float:
    return statistics.fmean(
        max(compare(_normalised(right), _normalised(found)) for right in answers)
        for answers, found in zip(labels, predictions, strict=True)
    )


def _normalised(answer: str) -> list[str]:
    """Return an answer's words in lower case, without punctuation and articles."""
    kept = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _words_f1(right: list[str], found: list[str]) -> float:
    if not right or not found:
        return float(right == found)
    shared = sum((Counter(right) & Counter(found)).values())
    return 2 * shared / (len(right) + len(found))


def _correlation(function: Callable[..., Any], labels: Values, predictions: Values) -> float:
    if len(labels) < 2 or not np.isfinite(predictions).all():
        return 0.0
    value = float(function(labels, predictions).statistic)
    return 0.0 if math.isnan(value) else value


METRICS: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            *(accuracy, matthews, f1, micro_f1, macro_f1),
            *(pearson, spearman, seed_loss, squared_error),
            *(entity_f1, entity_precision, entity_recall, tag_accuracy),
            *(exact_match, overlap_f1),
        )
    }
)
_TITLES = {
    "matthews": "Matthews correlation",
    "f1": "F1",
    "pearson": "Pearson",
    "spearman": "Spearman correlation",
    "seed_loss": "published loss",
    "accuracy_mismatched": "mismatched accuracy",
    "micro_f1": "F1 over all labels",
    "macro_f1": "mean F1 of the labels",
    "entity_f1": "F1 of entities",
    "exact_match": "exact match",
    "overlap_f1": "F1 of the answers' words",
}
LOWER_IS_BETTER = frozenset({"seed_loss", "squared_error"})


def score(names: Sequence[str], labels: Any, predictions: Any) -> dict[str, float]:  # noqa: ANN401
    """Return scores by name; labels and predictions are those of the kind (kinds.py)."""
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


def title(names: Sequence[str]) -> str:
    """Return the words for the mean of these scores, such as "mean of accuracy and F1"."""
    words = " and ".join(_TITLES.get(name, name) for name in names)
    return f"mean of {words}" if len(names) > 1 else words
