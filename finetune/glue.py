"""The nine tasks of GLUE: file layout, labels, scores and the published settings.

A task is one entry of `TASKS`; no other module names one. examples.py reads the files that are
described here.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from finetune.config import FinetuneConfig
from finetune.scores import best

HUB_REPOSITORY = "nyu-mll/glue"
DIAGNOSTIC = "diagnostic"
"""The test set of MNLI that the benchmark calls AX: sentences by linguists, without labels."""


@dataclasses.dataclass(frozen=True)
class PublishedSettings:
    """Settings of the study (EIFY/fairseq, config/finetuning/*.yaml); ten epochs each."""

    learning_rate: float
    batch_size: int
    warmup_steps: int
    steps: int
    """Steps over which the learning rate falls to 0."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of the benchmark."""

    name: str
    """Also the name of its folder."""
    hub: str
    """Its name in `HUB_REPOSITORY`."""
    texts: tuple[str, ...]
    """The columns of its one or two texts, as the files' header lines name them."""
    published: PublishedSettings
    label: str = "label"
    """The label's column in train and dev."""
    labels: tuple[str, ...] = ("0", "1")
    """Class labels as the files write them; a class's id is its index. Empty: a regression."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Names in `scores.METRICS`; the first is the published one."""
    official: tuple[str, ...] = ("accuracy",)
    """The scores whose mean is the benchmark's score."""
    hub_texts: tuple[str, ...] = ()
    """The hub's names of `texts`, if they differ."""
    header: tuple[str, ...] = ()
    """The columns of train and dev, if the files have no header line."""
    dev: tuple[str, ...] = ("dev",)
    """The splits that are scored."""
    test: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"test": ""})
    """The server's file names by split without labels; empty: the task's name."""
    scale: float = 1.0
    """A regression learns the label divided by this."""
    skips_ragged: bool = False
    """Whether to skip training rows with a wrong number of columns; the benchmark has some."""

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number."""
        return not self.labels

    @property
    def classes(self) -> int:
        """Number of logits."""
        return len(self.labels) or 1

    @property
    def score_names(self) -> tuple[str, ...]:
        """Every score of a model: the metrics of each dev split."""
        return tuple(f"{metric}{suffix_of(split)}" for split in self.dev for metric in self.metrics)

    def scores_of_best(self, best_epoch_by: str) -> tuple[str, ...]:
        """Return the scores whose mean chooses the best epoch (`FinetuneConfig.best_epoch_by`)."""
        return self.official if best_epoch_by == "benchmark" else self.metrics[:1]

    def config(self, recipe: str) -> FinetuneConfig:
        """Return the settings of a recipe.

        Both recipes use the published epochs, batch size and learning rate. "published" also counts
        warm-up and decay in the published numbers of steps, and chooses the best epoch by the
        published score. "default" uses the published share of warm-up steps, clips gradients,
        batches examples of similar lengths, and chooses the best epoch by the benchmark's score.
        """
        published = self.published
        config = FinetuneConfig(
            epochs=10,
            batch_size=published.batch_size,
            learning_rate=published.learning_rate,
            warmup_fraction=round(published.warmup_steps / published.steps, 2),
            best_epoch_by="benchmark",
        )
        if recipe == "default":
            return config
        return dataclasses.replace(
            config,
            gradient_clipping=0.0,
            best_epoch_by="published",
            length_window=1,
            warmup_steps=published.warmup_steps,
            schedule_steps=published.steps,
        )


def suffix_of(split: str) -> str:
    """Return the suffix of a dev split's scores: empty, except for MNLI's mismatched split."""
    return "_mismatched" if split.endswith("_mismatched") else ""


_ENTAILMENT = ("entailment", "not_entailment")
_TASKS = (
    # Warstadt et al. 2019: acceptable or not; the third column is the author's mark.
    Task(
        name="CoLA",
        hub="cola",
        texts=("sentence",),
        published=PublishedSettings(1e-5, 16, 320, 5336),
        metrics=("accuracy", "matthews"),
        official=("matthews",),
        header=("source", "label", "mark", "sentence"),
    ),
    # Socher et al. 2013: sentiment of film reviews.
    Task(
        name="SST-2",
        hub="sst2",
        texts=("sentence",),
        published=PublishedSettings(1e-5, 32, 1256, 20935),
    ),
    # Dolan and Brockett 2005: paraphrases in the news.
    Task(
        name="MRPC",
        hub="mrpc",
        texts=("#1 String", "#2 String"),
        hub_texts=("sentence1", "sentence2"),
        published=PublishedSettings(1e-5, 16, 137, 2296),
        label="Quality",
        metrics=("accuracy", "f1"),
        official=("accuracy", "f1"),
    ),
    # Cer et al. 2017: similarity in meaning, from 0 to 5. EIFY/fairseq learns a fifth of it.
    Task(
        name="STS-B",
        hub="stsb",
        texts=("sentence1", "sentence2"),
        published=PublishedSettings(2e-5, 16, 214, 3598),
        label="score",
        labels=(),
        metrics=("seed_loss", "pearson", "spearman"),
        official=("pearson", "spearman"),
        scale=5.0,
    ),
    # Quora's question pairs.
    Task(
        name="QQP",
        hub="qqp",
        texts=("question1", "question2"),
        published=PublishedSettings(1e-5, 32, 28318, 113272),
        label="is_duplicate",
        metrics=("accuracy", "f1"),
        official=("accuracy", "f1"),
        skips_ragged=True,
    ),
    # Williams et al. 2018. The published score is that of the matched split.
    Task(
        name="MNLI",
        hub="mnli",
        texts=("sentence1", "sentence2"),
        hub_texts=("premise", "hypothesis"),
        published=PublishedSettings(1e-5, 32, 7432, 123873),
        label="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        official=("accuracy", "accuracy_mismatched"),
        dev=("dev_matched", "dev_mismatched"),
        test={"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", DIAGNOSTIC: "AX"},
    ),
    # Rajpurkar et al. 2016, as the benchmark recast it.
    Task(
        name="QNLI",
        hub="qnli",
        texts=("question", "sentence"),
        published=PublishedSettings(1e-5, 32, 1986, 33112),
        labels=_ENTAILMENT,
    ),
    # Dagan et al. 2006 and its successors.
    Task(
        name="RTE",
        hub="rte",
        texts=("sentence1", "sentence2"),
        published=PublishedSettings(2e-5, 16, 122, 2036),
        labels=_ENTAILMENT,
    ),
    # Levesque et al. 2012. Not in the study: the settings are ours, after CoLA's.
    Task(
        name="WNLI",
        hub="wnli",
        texts=("sentence1", "sentence2"),
        published=PublishedSettings(1e-5, 16, 24, 397),
    ),
)
TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _TASKS})


def _simplified(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


_NAMES = {_simplified(name): name for name in TASKS}


def find(name: str) -> Task:
    """Return the task of a name, in any case and with or without its hyphen.

    Raises:
        ValueError: there is none; as `find_all`.
    """
    return _known([name])[0]


def find_all(names: Sequence[str]) -> list[Task]:
    """Return the tasks of the names, in any case; ["all"] is every task.

    Raises:
        ValueError: an unknown name (all are listed, each with the nearest task), or "all" or a task
            beside others a second time.
    """
    if [name.lower() for name in names] == ["all"]:
        return list(TASKS.values())
    tasks = _known(names)
    if len({task.name for task in tasks}) < len(tasks):
        raise ValueError(f"tasks {', '.join(names)}: accepted: each task once, as in CoLA,RTE")
    return tasks


def _known(names: Sequence[str]) -> list[Task]:
    unknown = [name for name in names if _simplified(name) not in _NAMES]
    if unknown:
        what = "task" if len(unknown) == 1 else "tasks"
        raise ValueError(
            f"unknown {what} {', '.join(map(_with_nearest, unknown))}; accepted: "
            f"{', '.join(TASKS)}, or all alone"
        )
    return [TASKS[_NAMES[_simplified(name)]] for name in names]


def _with_nearest(name: str) -> str:
    near = difflib.get_close_matches(_simplified(name), _NAMES, n=1)
    return f"{name!r}" + (f" (did you mean {_NAMES[near[0]]}?)" if near else "")


def published_score(run: Mapping[str, Any]) -> float:
    """Return the published score of a run: its first metric in the epoch where that is best."""
    metric = find(run["task"]).metrics[0]
    return float(best(run["epochs"], [metric])[metric])
