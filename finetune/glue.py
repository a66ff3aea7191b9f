"""The benchmark's nine tasks as one table: layout, labels, scores, and the original's settings.

A task is one entry of `TASKS`; nothing else names it. examples.py reads what is described here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from finetune.config import FinetuneConfig

RECIPES = ("default", "seed")
"""Settings to begin with: the original's as far as they help (see `Task.config`), or exactly."""
HUB_REPOSITORY = "nyu-mll/glue"
DIAGNOSTIC = "diagnostic"
"""The split of MNLI that the benchmark calls AX: sentences of linguists, without labels."""


@dataclasses.dataclass(frozen=True)
class SeedSettings:
    """What the original fine-tunes with (its config/finetuning/*.yaml), ten epochs each."""

    learning_rate: float
    batch_size: int
    warmup_steps: int
    steps: int
    """Over which the learning rate falls to 0."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of the benchmark."""

    name: str
    """Also the name of its folder."""
    hub: str
    """Its name in `HUB_REPOSITORY`."""
    texts: tuple[str, ...]
    """The columns to read, one or two, by the names in the files' header lines."""
    label: str
    """The label's column, in train and dev."""
    labels: tuple[str, ...]
    """As the files write them; a label's id is its place here and on the hub. None: a number."""
    metrics: tuple[str, ...]
    """Names of `scores.METRICS`; the first is the original's and chooses the best epoch."""
    official: tuple[str, ...]
    """The scores whose mean is the benchmark's."""
    seed: SeedSettings
    hub_texts: tuple[str, ...] = ()
    """The hub's names of `texts`, where they are others."""
    header: tuple[str, ...] = ()
    """The columns of train and dev, where these have no header line."""
    dev: tuple[str, ...] = ("dev",)
    """The splits that are scored; the scores of the second carry its ending."""
    test: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: MappingProxyType({"test": ""})
    )
    """Splits without labels, and the server's names of their predictions; empty: the task's."""
    scale: float = 1.0
    """A number is divided by it to be learned."""
    skips_ragged: bool = False
    """Whether the benchmark's own training file has rows with too few or too many columns."""

    @property
    def is_regression(self) -> bool:
        """Whether a number is to be learned rather than a class."""
        return not self.labels

    @property
    def classes(self) -> int:
        """Logits that a model needs."""
        return len(self.labels) or 1

    @property
    def score_names(self) -> tuple[str, ...]:
        """Every score of a model: the metrics of each dev split."""
        return tuple(f"{metric}{ending_of(split)}" for split in self.dev for metric in self.metrics)

    def config(self, recipe: str) -> FinetuneConfig:
        """The settings of a recipe, one of `RECIPES`.

        The default takes the original's epochs, batch size, learning rate and share of warm-up,
        clips gradients and reads batches of nearly equal lengths. "seed" does neither, and counts
        warm-up and decay in the original's own numbers of steps.
        """
        seed = self.seed
        config = FinetuneConfig(
            epochs=10,
            batch_size=seed.batch_size,
            learning_rate=seed.learning_rate,
            warmup_fraction=round(seed.warmup_steps / seed.steps, 2),
        )
        if recipe == "default":
            return config
        return dataclasses.replace(
            config,
            gradient_clipping=0.0,
            length_window=1,
            warmup_steps=seed.warmup_steps,
            schedule_steps=seed.steps,
        )


def ending_of(split: str) -> str:
    """What the scores of a dev split end in: nothing, but for MNLI's mismatched."""
    return "_mismatched" if split.endswith("_mismatched") else ""


_ENTAILMENT = ("entailment", "not_entailment")
_BINARY = ("0", "1")

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            # Warstadt et al. 2019: acceptable or not; the third column is the author's mark.
            Task(
                name="CoLA",
                hub="cola",
                texts=("sentence",),
                label="label",
                labels=_BINARY,
                metrics=("accuracy", "matthews"),
                official=("matthews",),
                seed=SeedSettings(1e-5, 16, 320, 5336),
                header=("source", "label", "mark", "sentence"),
            ),
            # Socher et al. 2013: the sentiment of film reviews.
            Task(
                name="SST-2",
                hub="sst2",
                texts=("sentence",),
                label="label",
                labels=_BINARY,
                metrics=("accuracy",),
                official=("accuracy",),
                seed=SeedSettings(1e-5, 32, 1256, 20935),
            ),
            # Dolan and Brockett 2005: paraphrases in the news.
            Task(
                name="MRPC",
                hub="mrpc",
                texts=("#1 String", "#2 String"),
                hub_texts=("sentence1", "sentence2"),
                label="Quality",
                labels=_BINARY,
                metrics=("accuracy", "f1"),
                official=("accuracy", "f1"),
                seed=SeedSettings(1e-5, 16, 137, 2296),
            ),
            # Cer et al. 2017: how alike in meaning, from 0 to 5. The original learns a fifth of it.
            Task(
                name="STS-B",
                hub="stsb",
                texts=("sentence1", "sentence2"),
                label="score",
                labels=(),
                metrics=("seed_loss", "pearson", "spearman"),
                official=("pearson", "spearman"),
                seed=SeedSettings(2e-5, 16, 214, 3598),
                scale=5.0,
            ),
            # Quora's question pairs.
            Task(
                name="QQP",
                hub="qqp",
                texts=("question1", "question2"),
                label="is_duplicate",
                labels=_BINARY,
                metrics=("accuracy", "f1"),
                official=("accuracy", "f1"),
                seed=SeedSettings(1e-5, 32, 28318, 113272),
                skips_ragged=True,
            ),
            # Williams et al. 2018. The original scores the matched half alone.
            Task(
                name="MNLI",
                hub="mnli",
                texts=("sentence1", "sentence2"),
                hub_texts=("premise", "hypothesis"),
                label="gold_label",
                labels=("entailment", "neutral", "contradiction"),
                metrics=("accuracy",),
                official=("accuracy", "accuracy_mismatched"),
                seed=SeedSettings(1e-5, 32, 7432, 123873),
                dev=("dev_matched", "dev_mismatched"),
                test=MappingProxyType(
                    {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", DIAGNOSTIC: "AX"}
                ),
            ),
            # Rajpurkar et al. 2016, as the benchmark recast it.
            Task(
                name="QNLI",
                hub="qnli",
                texts=("question", "sentence"),
                label="label",
                labels=_ENTAILMENT,
                metrics=("accuracy",),
                official=("accuracy",),
                seed=SeedSettings(1e-5, 32, 1986, 33112),
            ),
            # Dagan et al. 2006 and its successors.
            Task(
                name="RTE",
                hub="rte",
                texts=("sentence1", "sentence2"),
                label="label",
                labels=_ENTAILMENT,
                metrics=("accuracy",),
                official=("accuracy",),
                seed=SeedSettings(2e-5, 16, 122, 2036),
            ),
            # Levesque et al. 2012. The original leaves it out; the settings are ours, after CoLA's.
            Task(
                name="WNLI",
                hub="wnli",
                texts=("sentence1", "sentence2"),
                label="label",
                labels=_BINARY,
                metrics=("accuracy",),
                official=("accuracy",),
                seed=SeedSettings(1e-5, 16, 24, 397),
            ),
        )
    }
)


def find(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: there is none; the known ones are listed.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r}; accepted: {', '.join(TASKS)}, or all")
    return TASKS[name]


def find_all(names: Sequence[str]) -> list[Task]:
    """The tasks of some names; "all" is every one.

    Raises:
        ValueError: an unknown name, or "all" beside others.
    """
    return list(TASKS.values()) if list(names) == ["all"] else [find(name) for name in names]
