"""Results of evaluations, for tests of tables and pictures."""

import math

from pretrain.models.scores import Evaluation, Score


def score(perplexity, targets=1000):
    return Score(math.log(perplexity), perplexity, targets, 0.25)


def evaluation(length, perplexity, positions=None, interpolated=None, terms=None, **more):
    subsets = {"a": score(2.0), "b": score(3.0)}
    return Evaluation(
        score(perplexity), subsets, terms or {}, length=length, blocks=7, coverage=0.5,
        positions={edge: score(*values) for edge, values in (positions or {}).items()},
        interpolated=interpolated and score(interpolated), **more,
    )  # fmt: skip
