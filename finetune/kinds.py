"""The two kinds of tasks, classification and regression: the loss, and what counts as right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from finetune.examples import Example
from finetune.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor

Answers = npt.NDArray[Any]
"""[N]: class ids, or the numbers that a regression learns."""
Output = npt.NDArray[np.float32]
"""[C]: the logits of an example."""


class Objective:
    """The training objective of a task, of one term."""

    def __init__(self, task: Task) -> None:
        """Train what the task asks for."""
        self.terms: Mapping[str, float] = MappingProxyType({task.kind: 1.0})
        self._task = task

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        """Return the loss, summed over the examples of a batch: [1]."""
        logits = model(batch["input_ids"], batch.get("document_ids"), batch.get("segment_ids"))
        return loss(self._task, logits, batch["labels"]).unsqueeze(0)


def loss(task: Task, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy in nats, or the squared error, summed over examples, in fp32.

    Args:
        task: the task.
        logits: [B, C].
        labels: [B], as `truth` has them.
    """
    import torch.nn.functional as F  # noqa: N812

    if task.is_regression:
        return F.mse_loss(logits.float().squeeze(-1), labels, reduction="sum")
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def truth(task: Task, examples: Sequence[Example]) -> Answers:
    """Return the right answers."""
    labels = [example.label for example in examples]
    return np.array(labels, dtype=np.float32 if task.is_regression else np.int64)


def answers(task: Task, outputs: Sequence[Output]) -> Answers:
    """Return the model's answers: the likeliest classes, or the numbers."""
    logits = np.stack(outputs)
    return logits[:, 0] if task.is_regression else logits.argmax(axis=1)


def constant(task: Task, right: Answers) -> Answers:
    """Return the best answer that is the same for every example.

    No constant is more accurate than the majority class, or has a lower squared error than the
    mean.
    """
    return np.full_like(right, right.mean() if task.is_regression else np.bincount(right).argmax())
