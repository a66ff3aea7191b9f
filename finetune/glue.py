"""The nine tasks of GLUE: file layout, labels, scores and the published settings.

A task is one entry of `TASKS`; no other module names one. examples.py reads the files that are
described here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from finetune.config import FinetuneConfig
from finetune.task import Task

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
class BenchmarkTask(Task):
    """A task of a public benchmark: also where its files and its copy on the hub have what."""

    hub: str = ""
    """Its name in `repository`."""
    repository: str = HUB_REPOSITORY
    folder: str = ""
    """Its folder in the benchmark's archive, if that is not its name."""
    hub_texts: tuple[str, ...] = ()
    """The hub's names of `texts`, if they differ."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of the files of splits, if they are JSON Lines, as SuperGLUE's; GLUE's are TSV."""
    header: tuple[str, ...] = ()
    """The columns of train and dev, if the files have no header line."""
    test: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"test": ""})
    """The server's file names by split without labels; empty: the task's name."""
    skips_ragged: bool = False
    """Whether to skip training rows with a wrong number of columns; the benchmark has some."""
    published: PublishedSettings | None = None

    def config(self, recipe: str) -> FinetuneConfig:
        """Return the settings of a recipe.

        Both recipes use the published epochs, batch size and learning rate. "published" also counts
        warm-up and decay in the published numbers of steps, and chooses the best epoch by the
        published score. "default" uses the published share of warm-up steps, clips gradients,
        batches examples of similar lengths, and chooses the best epoch by the benchmark's score.

        Raises:
            ValueError: the study has no settings for the task.
        """
        published = self.published
        if published is None:
            if recipe != "default":
                raise ValueError(f"{self.name}: the study has no settings for it; use the default")
            return super().config(recipe)
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


_ENTAILMENT = ("entailment", "not_entailment")
_TASKS = (
    # Warstadt et al. 2019: acceptable or not; the third column is the author's mark.
    BenchmarkTask(
        name="CoLA",
        hub="cola",
        texts=("sentence",),
        published=PublishedSettings(1e-5, 16, 320, 5336),
        metrics=("accuracy", "matthews"),
        official=("matthews",),
        header=("source", "label", "mark", "sentence"),
    ),
    # Socher et al. 2013: sentiment of film reviews.
    BenchmarkTask(
        name="SST-2",
        hub="sst2",
        texts=("sentence",),
        published=PublishedSettings(1e-5, 32, 1256, 20935),
    ),
    # Dolan and Brockett 2005: paraphrases in the news.
    BenchmarkTask(
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
    BenchmarkTask(
        name="STS-B",
        hub="stsb",
        texts=("sentence1", "sentence2"),
        published=PublishedSettings(2e-5, 16, 214, 3598),
        label="score",
        kind="regression",
        labels=(),
        metrics=("seed_loss", "pearson", "spearman"),
        official=("pearson", "spearman"),
        scale=5.0,
    ),
    # Quora's question pairs.
    BenchmarkTask(
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
    BenchmarkTask(
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
    BenchmarkTask(
        name="QNLI",
        hub="qnli",
        texts=("question", "sentence"),
        published=PublishedSettings(1e-5, 32, 1986, 33112),
        labels=_ENTAILMENT,
    ),
    # Dagan et al. 2006 and its successors.
    BenchmarkTask(
        name="RTE",
        hub="rte",
        texts=("sentence1", "sentence2"),
        published=PublishedSettings(2e-5, 16, 122, 2036),
        labels=_ENTAILMENT,
    ),
    # Levesque et al. 2012. Not in the study: the settings are ours, after CoLA's.
    BenchmarkTask(
        name="WNLI",
        hub="wnli",
        texts=("sentence1", "sentence2"),
        published=PublishedSettings(1e-5, 16, 24, 397),
    ),
)
TASKS: Mapping[str, BenchmarkTask] = MappingProxyType({task.name: task for task in _TASKS})
