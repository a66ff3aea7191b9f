"""Whether a fine-tune has collapsed: answers like the majority class, or like any constant.

A collapsed run says little about the model that it began with: the usual cause are gradients that
vanish early in training (Mosbach et al. 2021, On the Stability of Fine-tuning BERT). So it must
neither be averaged in silence nor dropped in silence. Pure functions of plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAST_EXPLAINED = 0.1
"""Share of the labels' variance below which a regression counts as constant.

The original's ALiBi, large, explains less on STS-B (published.py)."""


def reason(
    metric: str, best: Mapping[str, float], constant: Mapping[str, float], answers: int
) -> str:
    """Why a run counts as collapsed, in words; empty where it does not.

    Args:
        metric: the task's first, "accuracy" or "seed_loss".
        best: the scores of the best epoch.
        constant: those of the best constant answer on the same examples.
        answers: how many different ones the best epoch's model gave.
    """
    if answers <= 1:
        return "always the same answer"
    if metric == "seed_loss":
        explained = 1 - best[metric] / constant[metric] if constant[metric] else 0.0
        return "no better than a constant" if explained < LEAST_EXPLAINED else ""
    return "no better than the majority class" if best[metric] <= constant[metric] else ""
