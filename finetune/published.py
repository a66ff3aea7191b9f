"""The published GLUE table, as printed, and which of its scores look like collapsed runs.

Source: "Masked Language Model with ALiBi and CLAP head" (2024-05-07), tables roberta.base and
roberta.large, and EIFY/fairseq's README. One run each, the best of ten epochs on the dev set:
accuracy in per cent, for STS-B the loss (`scores.seed_loss`); MNLI matched; no WNLI.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from finetune import collapse

SOURCE = "EIFY/fairseq and its write-up of 2024-05-07"
TASKS = ("CoLA", "MNLI", "MRPC", "QNLI", "QQP", "RTE", "SST-2", "STS-B")
"""The table's columns."""

_ROWS = """
base baseline      83.6 84.2 90   91.6 91.3 73.6 92.1 0.028
base learned-clap  81.7 84.4 86.3 90.9 91.2 72.6 92.5 0.027
base alibi         69.2 85.1 80.9 92   91.5 63.9 93.1 0.033
base zero-clap     70.5 84.9 75.5 90.6 91.1 54.9 89.7 0.041
large baseline     83.7 86.8 84.3 92.5 91.8 79.8 93.3 0.027
large learned-clap 84.1 86.3 89.7 92.8 91.7 79.8 93.7 0.023
large alibi        69.1 86.5 68.4 92.4 91.7 52.7 93.6 0.123
large zero-clap    69.1 86.7 81.9 92.2 91.6 52.7 93.1 0.031
"""

CONSTANT: Mapping[str, float] = MappingProxyType(
    {"CoLA": 69.1, "MRPC": 68.4, "RTE": 52.7, "SST-2": 50.9, "QNLI": 50.5, "STS-B": 0.130}
)
"""Scores of the best constant answer on the dev sets, in the table's units. Computed from the
benchmark's files; a test repeats that where the files are available."""


def table() -> dict[str, dict[str, float]]:
    """Return the scores by model ("base alibi") and task, in the table's units."""
    rows = (line.split() for line in _ROWS.strip().splitlines())
    return {
        f"{size} {variant}": dict(zip(TASKS, map(float, values), strict=True))
        for size, variant, *values in rows
    }


def printed() -> dict[str, dict[str, str]]:
    """Return the scores as printed, with an asterisk where they look like collapsed runs."""
    return {
        model: {
            task: (f"{value:.3f}" if task == "STS-B" else f"{value:.1f}")
            + ("*" if looks_collapsed(task, value) else "")
            for task, value in scores.items()
        }
        for model, scores in table().items()
    }


def looks_collapsed(task: str, value: float) -> bool:
    """Return whether a printed score is no better than that of a constant answer."""
    if task not in CONSTANT:
        return False
    if task == "STS-B":
        return 1 - value / CONSTANT[task] < collapse.LEAST_EXPLAINED
    return value <= CONSTANT[task]
