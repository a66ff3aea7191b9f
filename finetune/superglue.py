"""Four tasks of SuperGLUE (Wang et al. 2019), those that a classification head can do.

The settings are ours: the study has none. Recognising textual entailment has the examples of
GLUE's RTE in another layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from finetune.glue import BenchmarkTask

_FILES = MappingProxyType({"train": "train", "dev": "val", "test": "test"})
_REPOSITORY = "aps/super_glue"


def _task(
    name: str, texts: tuple[str, ...], labels: tuple[str, ...], *scores: str
) -> BenchmarkTask:
    return BenchmarkTask(
        name=name,
        hub=name.removeprefix("SuperGLUE-").lower(),
        repository=_REPOSITORY,
        folder=name.removeprefix("SuperGLUE-"),
        files=_FILES,
        texts=texts,
        labels=labels,
        metrics=("accuracy", *scores),
        official=("accuracy", *scores),
    )


_BOOLEAN = ("false", "true")
_TASKS = (
    # Clark et al. 2019: a yes-no question and a passage.
    _task("BoolQ", ("question", "passage"), _BOOLEAN),
    # De Marneffe et al. 2019: the F1 is the mean over the three classes.
    _task("CB", ("premise", "hypothesis"), ("entailment", "contradiction", "neutral"), "macro_f1"),
    _task("SuperGLUE-RTE", ("premise", "hypothesis"), ("entailment", "not_entailment")),
    # Pilehvar and Camacho-Collados 2019: whether a word means the same in two sentences.
    _task("WiC", ("word", "sentence1", "sentence2"), _BOOLEAN),
)
TASKS: Mapping[str, BenchmarkTask] = MappingProxyType({task.name: task for task in _TASKS})
