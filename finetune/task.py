"""What a fine-tuning task is: its kind, its labels and its scores.

GLUE's and SuperGLUE's tasks are entries of tables (glue.py, superglue.py). A task of the user's own
is read from files (tables.py) and stands, whole, in the plans of its runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from finetune.scores import best

Kind = Literal["classification", "regression"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One task."""

    name: str
    """Also the name of its folder, and of the head that is trained."""
    kind: Kind = "classification"
    """classification: one of `labels`. regression: a number."""
    texts: tuple[str, ...] = ("text",)
    """The columns of its one or two texts."""
    label: str = "label"
    """The column of its label."""
    labels: tuple[str, ...] = ("0", "1")
    """Labels as the files write them; a label's id is its index. Empty for a regression."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Names of scores; the first is the published one."""
    official: tuple[str, ...] = ("accuracy",)
    """The scores whose mean is the task's score."""
    dev: tuple[str, ...] = ("dev",)
    """The splits that are scored."""
    scale: float = 1.0
    """A regression learns the label divided by this."""

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number."""
        return self.kind == "regression"

    @property
    def classes(self) -> int:
        """Number of logits."""
        return 1 if self.is_regression else len(self.labels)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Every score of a model: the metrics of each dev split."""
        return tuple(f"{metric}{suffix_of(split)}" for split in self.dev for metric in self.metrics)

    def scores_of_best(self, best_epoch_by: str) -> tuple[str, ...]:
        """Return the scores whose mean chooses the best epoch (`FinetuneConfig.best_epoch_by`)."""
        if best_epoch_by == "last":
            return ("epoch",)  # the largest number
        return self.official if best_epoch_by == "benchmark" else self.metrics[:1]

    def first_metric(self, run: Mapping[str, Any]) -> float:
        """Return the first metric of a run, in the epoch where it is best: as tables publish it."""
        return float(best(run["epochs"], self.metrics[:1])[self.metrics[0]])


def suffix_of(split: str) -> str:
    """Return the suffix of a split's scores: "_mismatched" of MNLI's, "_test" of a test split."""
    return "_" + split.rpartition("_")[2] if split not in ("dev", "dev_matched") else ""
