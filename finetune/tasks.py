"""Tasks: kind, labels, loss and scores; the nine tasks of GLUE; collapsed runs.

A task of GLUE is one entry of `TASKS`, whose files examples.py reads. A custom task is read from
files (custom_task.py) and stored in the plans of its runs.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from finetune import scores
from finetune.scores import Values

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["classification", "regression"]
Logits = npt.NDArray[np.float32]
"""[N, C]"""
HUB_REPOSITORY = "nyu-mll/glue"
_LEAST_SPREAD = 0.1
"""A regression whose answers have a smaller standard deviation, as a share of the labels', has
collapsed; they still differ in some digit."""


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
        return self.official if best_epoch_by == "benchmark" else self.metrics[:1]


def suffix_of(split: str) -> str:
    """Return the suffix of a split's scores: "_mismatched" of MNLI's, "_test" of a test split."""
    return "_" + split.rpartition("_")[2] if split not in ("dev", "dev_matched") else ""


@dataclasses.dataclass(frozen=True)
class BenchmarkTask(Task):
    """A task of GLUE, with the layout of its files and of its copy on the hub."""

    hub_texts: tuple[str, ...] = ()
    """The hub's names of `texts`, if they differ."""
    header: tuple[str, ...] = ()
    """The columns of train and dev, if the files have no header line."""
    test: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"test": ""})
    """The server's file names by split without labels; empty: the task's name."""
    skips_ragged: bool = False
    """Whether to skip training rows with a wrong number of columns; the benchmark has some."""

    @property
    def hub(self) -> str:
        """Its name in `HUB_REPOSITORY`, and the folder of a saved dataset."""
        return _simplified(self.name)


def _simplified(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


_PAIR, _ENTAILMENT = ("sentence1", "sentence2"), ("entailment", "not_entailment")
_WITH_F1 = ("accuracy", "f1")
_TASKS = (
    # Warstadt et al. 2019: acceptable or not; the third column is the author's mark.
    BenchmarkTask(
        name="CoLA",
        texts=("sentence",),
        metrics=("accuracy", "matthews"),
        official=("matthews",),
        header=("source", "label", "mark", "sentence"),
    ),
    # Socher et al. 2013: sentiment of film reviews.
    BenchmarkTask(name="SST-2", texts=("sentence",)),
    # Dolan and Brockett 2005: paraphrases in the news.
    BenchmarkTask(
        name="MRPC",
        texts=("#1 String", "#2 String"),
        hub_texts=_PAIR,
        label="Quality",
        metrics=_WITH_F1,
        official=_WITH_F1,
    ),
    # Cer et al. 2017: similarity in meaning, from 0 to 5. EIFY/fairseq learns a fifth of it.
    BenchmarkTask(
        name="STS-B",
        texts=_PAIR,
        label="score",
        kind="regression",
        labels=(),
        metrics=("published_loss", "pearson", "spearman"),
        official=("pearson", "spearman"),
        scale=5.0,
    ),
    # Quora's question pairs.
    BenchmarkTask(
        name="QQP",
        texts=("question1", "question2"),
        label="is_duplicate",
        metrics=_WITH_F1,
        official=_WITH_F1,
        skips_ragged=True,
    ),
    # Williams et al. 2018. The published score is that of the matched split.
    BenchmarkTask(
        name="MNLI",
        texts=_PAIR,
        hub_texts=("premise", "hypothesis"),
        label="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        official=("accuracy", "accuracy_mismatched"),
        dev=("dev_matched", "dev_mismatched"),
        test={"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"},
    ),
    # Rajpurkar et al. 2016, as the benchmark recast it.
    BenchmarkTask(name="QNLI", texts=("question", "sentence"), labels=_ENTAILMENT),
    # Dagan et al. 2006 and its successors.
    BenchmarkTask(name="RTE", texts=_PAIR, labels=_ENTAILMENT),
    # Levesque et al. 2012.
    BenchmarkTask(name="WNLI", texts=_PAIR),
)
TASKS: Mapping[str, BenchmarkTask] = {task.name: task for task in _TASKS}


_NAMES = {_simplified(name): name for name in TASKS}


def find(names: Sequence[str]) -> list[BenchmarkTask]:
    """Return the tasks of the names, in any case, with or without hyphens; ["all"] is every task.

    Raises:
        ValueError: an unknown name (all are listed, each with the nearest task), or a task twice.
    """
    if [_simplified(name) for name in names] == ["all"]:
        return list(TASKS.values())
    if unknown := [name for name in names if _simplified(name) not in _NAMES]:
        raise ValueError(
            f"unknown task{'s' * (len(unknown) > 1)} {', '.join(map(_with_nearest, unknown))}; "
            f"accepted: {', '.join(TASKS)}, or all alone"
        )
    tasks = [TASKS[_NAMES[_simplified(name)]] for name in names]
    if len({task.name for task in tasks}) < len(tasks):
        raise ValueError(f"tasks {', '.join(names)}: name each task once, as in CoLA,RTE")
    return tasks


def _with_nearest(name: str) -> str:
    near = difflib.get_close_matches(_simplified(name), _NAMES, n=1)
    return f"{name!r}" + (f" (did you mean {_NAMES[near[0]]}?)" if near else "")


def has_collapsed(task: Task, right: Values, given: Values) -> bool:
    """Return whether a model's answers are all alike; those of a diverged regression are too.

    A collapsed run says little about the pretrained model: the usual cause is vanishing gradients
    early in training (Mosbach et al. 2021, On the Stability of Fine-tuning BERT). Collapsed runs
    are marked and counted, and not dropped silently.
    """
    if task.is_regression:
        is_finite = np.isfinite(given).all()
        return not (is_finite and given.std() >= _LEAST_SPREAD * right.std())
    return len(np.unique(given)) == 1


class Objective:
    """The training objective of a task, of one term."""

    def __init__(self, task: Task) -> None:
        """Build the objective of a task."""
        self.terms: Mapping[str, float] = {task.kind: 1.0}
        self._task = task

    def loss(self, model: Any, batch: Mapping[str, "Tensor"]) -> "Tensor":  # noqa: ANN401
        """Return the loss, summed over the examples of a batch: [1]."""
        logits = model(batch["input_ids"], batch.get("document_ids"), batch.get("segment_ids"))
        return loss(self._task, logits, batch["labels"]).unsqueeze(0)


def loss(task: Task, logits: "Tensor", labels: "Tensor") -> "Tensor":
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


def truth(task: Task, labels: Sequence[float]) -> Values:
    """Return the right answers."""
    return np.array(labels, dtype=np.float32 if task.is_regression else np.int64)


def answers(task: Task, logits: Logits) -> Values:
    """Return the model's answers: the likeliest classes, or the numbers."""
    return logits[:, 0] if task.is_regression else logits.argmax(axis=1)


def score(task: Task, split: str, right: Values, given: Values) -> dict[str, float]:
    """Return the scores of a split's answers by name, a squared error in the units of the files.

    The published loss is that of the learned numbers.
    """
    found = scores.score(task.metrics, right, given)
    if "squared_error" in found:
        found["squared_error"] *= task.scale * task.scale
    return {f"{name}{suffix_of(split)}": value for name, value in found.items()}


def constant(task: Task, right: Values) -> Values:
    """Return the best answer that is the same for every example.

    No constant is more accurate than the majority class, or has a lower squared error than the
    mean.
    """
    return np.full_like(right, right.mean() if task.is_regression else np.bincount(right).argmax())
