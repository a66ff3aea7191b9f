"""The tasks: where a task's files lie, how they are laid out, what is scored.

A task is one entry of `TASKS`; nothing else names it. A file is tab-separated text without quoting:
a quotation mark is part of the sentence.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from data_prep.files import sha256_of
from finetune.config import FinetuneConfig

SPLITS = ("train", "dev")


@dataclasses.dataclass(frozen=True)
class Example:
    """A sentence and the index of its label."""

    sentence: str
    label: int


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of the benchmark."""

    name: str
    """Also the name of its folder."""
    columns: int
    sentence_column: int
    """Counted from 0, like the label's."""
    label_column: int
    labels: tuple[str, ...]
    """As the files write them; a label's id is its place here."""
    metrics: tuple[str, ...]
    """Names of `scores.METRICS`; the first one chooses the best epoch."""
    defaults: FinetuneConfig

    def path(self, data: Path, split: str) -> Path:
        """The file of a split.

        Raises:
            ValueError: there is none.
        """
        path = data / self.name / f"{split}.tsv"
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file; accepted: a folder with {self.name}/train.tsv and "
                f"{self.name}/dev.tsv in it"
            )
        return path

    def read(self, data: Path, split: str) -> list[Example]:
        """Every example of a split, in the file's order.

        Raises:
            ValueError: the file is missing or empty, or a line is not in the task's layout; file
                and line are named.
        """
        path = self.path(data, split)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8: {error}") from error
        # Split on line feeds alone: other separators (U+2028 and its like) are part of a sentence.
        lines = text.removesuffix("\n").split("\n") if text else []
        if not lines:
            raise ValueError(f"{path}: is empty; accepted: at least one example")
        return [self._parse(line, f"{path}: line {n}") for n, line in enumerate(lines, start=1)]

    def _parse(self, line: str, place: str) -> Example:
        columns = line.removesuffix("\r").split("\t")
        if len(columns) != self.columns:
            raise ValueError(
                f"{place}: has {len(columns)} tab-separated columns; accepted: {self.columns}"
            )
        sentence, label = columns[self.sentence_column].strip(), columns[self.label_column]
        if label not in self.labels:
            raise ValueError(f"{place}: label {label!r}; accepted: {', '.join(self.labels)}")
        if not sentence:
            raise ValueError(f"{place}: the sentence is empty; accepted: some text")
        return Example(sentence, self.labels.index(label))

    def digest(self, data: Path) -> str:
        """Hex sha256 that identifies the task's data."""
        parts = [sha256_of(self.path(data, split)) for split in SPLITS]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            # Warstadt et al. 2019: source, label, the author's mark (* or nothing), sentence. The
            # settings are the original's, which chooses the best epoch by accuracy.
            Task(
                name="CoLA",
                columns=4,
                sentence_column=3,
                label_column=1,
                labels=("0", "1"),
                metrics=("accuracy", "matthews"),
                defaults=FinetuneConfig(epochs=10, batch_size=16, learning_rate=1e-5),
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
        raise ValueError(f"task {name!r}; accepted: {', '.join(TASKS)}")
    return TASKS[name]
