"""Detection of collapsed fine-tuning runs: models that answer like a constant.

A collapsed run says little about the pretrained model: the usual cause is vanishing gradients early
in training (Mosbach et al. 2021, On the Stability of Fine-tuning BERT). Collapsed runs are marked
and counted, and neither averaged nor dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAST_EXPLAINED = 0.1
"""A regression that explains a smaller share of the labels' variance counts as constant.

The published large ALiBi model explains less on STS-B (published.py)."""

USUAL_RETRIES = 2
LEAST_RETRIED = 1000
"""Training examples from which a run that collapsed is retried without the user asking for it: with
fewer, another seed usually collapses as well."""


def reason(
    metric: str, best: Mapping[str, float], constant: Mapping[str, float], answers: int
) -> str:
    """Return why a run counts as collapsed, or an empty string if it does not.

    Args:
        metric: the task's first metric.
        best: scores of the epoch with the best such metric.
        constant: scores of the best constant answer on the same examples.
        answers: number of different answers that the kept model gave.
    """
    if answers <= 1:
        return "always the same answer"
    if metric == "seed_loss":
        explained = 1 - best[metric] / constant[metric] if constant[metric] else 0.0
        return "no better than a constant" if explained < LEAST_EXPLAINED else ""
    return "no better than a constant" if best[metric] <= constant[metric] else ""
