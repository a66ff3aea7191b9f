"""The nine tasks of GLUE: file layout, labels and scores.

A task is one entry of `TASKS`, whose files examples.py reads. protocols.py has the settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from finetune.task import Task

HUB_REPOSITORY = "nyu-mll/glue"
DIAGNOSTIC = "diagnostic"
"""The test set of MNLI that the benchmark calls AX: sentences by linguists, without labels."""


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


_ENTAILMENT = ("entailment", "not_entailment")
_TASKS = (
    # Warstadt et al. 2019: acceptable or not; the third column is the author's mark.
    BenchmarkTask(
        name="CoLA",
        hub="cola",
        texts=("sentence",),
        metrics=("accuracy", "matthews"),
        official=("matthews",),
        header=("source", "label", "mark", "sentence"),
    ),
    # Socher et al. 2013: sentiment of film reviews.
    BenchmarkTask(
        name="SST-2",
        hub="sst2",
        texts=("sentence",),
    ),
    # Dolan and Brockett 2005: paraphrases in the news.
    BenchmarkTask(
        name="MRPC",
        hub="mrpc",
        texts=("#1 String", "#2 String"),
        hub_texts=("sentence1", "sentence2"),
        label="Quality",
        metrics=("accuracy", "f1"),
        official=("accuracy", "f1"),
    ),
    # Cer et al. 2017: similarity in meaning, from 0 to 5. EIFY/fairseq learns a fifth of it.
    BenchmarkTask(
        name="STS-B",
        hub="stsb",
        texts=("sentence1", "sentence2"),
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
        labels=_ENTAILMENT,
    ),
    # Dagan et al. 2006 and its successors.
    BenchmarkTask(
        name="RTE",
        hub="rte",
        texts=("sentence1", "sentence2"),
        labels=_ENTAILMENT,
    ),
    # Levesque et al. 2012.
    BenchmarkTask(
        name="WNLI",
        hub="wnli",
        texts=("sentence1", "sentence2"),
    ),
)
TASKS: Mapping[str, BenchmarkTask] = MappingProxyType({task.name: task for task in _TASKS})
