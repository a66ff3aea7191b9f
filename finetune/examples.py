"""Read a task's examples from the benchmark's files, the hub or a saved copy.

`read_split` detects the source, reads a split and rejects rows that do not fit the task's layout.
TSV files are split on tabs and line feeds only: a quotation mark is part of the sentence (CoLA,
MRPC and QQP have unpaired ones), and so is U+2028.

`data` is one of
    a folder of TASK/train.tsv, TASK/dev.tsv, TASK/test.tsv   GLUE's own archive
    a folder of cola/, sst2/, ...                             written by `save_to_disk` of datasets
    "hub"                                                     downloaded by datasets
and for a custom task the folder that custom_task.py wrote.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune import tables
from finetune.tasks import HUB_REPOSITORY, BenchmarkTask, Task

HUB = "hub"


@dataclasses.dataclass(frozen=True)
class Example:
    """One or two texts and their label."""

    texts: tuple[str, ...]
    label: float = 0
    """A class id, or the number that a regression learns; 0 if there is no label."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The examples of a split, in the file's order."""

    examples: list[Example]
    skipped: int = 0
    """Number of ragged training rows that were left out (`BenchmarkTask.skips_ragged`)."""


def read_split(task: Task, data: str, split: str) -> Split:
    """Read every example of a split.

    Args:
        task: describes the layout.
        data: see the top of this file.
        split: "train", one of `task.dev`, or one of `task.test`, which have no labels.

    Raises:
        ValueError: the split is missing or empty, or a row does not follow the task's layout; the
            message names file and line.
    """
    if not isinstance(task, BenchmarkTask):
        result = _from_own(Path(data) / task.name / f"{split}.jsonl")
    elif data == HUB or (Path(data) / task.hub).is_dir():
        result = _from_datasets(task, data, split)
    else:
        result = _from_tsv(task, Path(data) / task.name / f"{split}.tsv", split)
    if not result.examples:
        raise ValueError(f"{data}: {task.name} {split}: is empty")
    return result


def digest(splits: Sequence[Split]) -> str:
    """Return the hex sha256 of the examples, which does not depend on where they were read from."""
    whole = hashlib.sha256()
    for split in splits:
        for example in split.examples:
            label = round(float(example.label), 6)
            whole.update(json.dumps([*example.texts, label]).encode())
        whole.update(b"\n")
    return whole.hexdigest()


def _from_own(path: Path) -> Split:
    """Read what `custom_task.write` wrote."""
    with path.open(encoding="utf-8") as lines:
        records = map(json.loads, lines)
        return Split([Example(tuple(each["texts"]), each["label"]) for each in records])


def _from_tsv(task: BenchmarkTask, path: Path, split: str) -> Split:
    labelled = split not in task.test
    if not path.is_file():
        needed = ("train", *task.dev) if labelled else (split,)
        missing = [f"{name}.tsv" for name in needed if not path.with_name(f"{name}.tsv").is_file()]
        raise ValueError(
            f"{path.parent}: has no {', '.join(missing)} (a saved dataset "
            f"{path.parents[1] / task.hub} or --data {HUB} would do as well)"
        )
    rows = [*enumerate(tables.tab_separated(path), start=1)]
    header = task.header if task.header and labelled else rows.pop(0)[1]
    columns = _columns(task, header, labelled, path)
    examples, skipped = [], 0
    for number, row in rows:
        where = f"{path}: line {number}"
        if len(row) == len(header):
            values = [row[column] for column in columns]
            examples.append(_example(task, values, task.labels, where))
        elif task.skips_ragged and split == "train":
            skipped += 1
        else:
            raise ValueError(
                f"{where}: has {len(row)} tab-separated columns; accepted: {len(header)}"
            )
    return Split(examples, skipped)


def _columns(task: BenchmarkTask, header: Sequence[str], labelled: bool, path: Path) -> list[int]:
    """Return the indices of the texts' columns, followed by the label's if there are labels."""
    if not labelled and task.label in header:
        raise ValueError(
            f"{path}: line 1: has labels, in column {task.label!r}, but a test set has none; a set "
            "with labels is scored as dev"
        )
    names = [*task.texts, *([task.label] if labelled else [])]
    hint = f"the header line must name {', '.join(names)}"
    tables.check_columns(f"{path}: line 1", header, names, hint)
    return [header.index(name) for name in names]


def _example(
    task: BenchmarkTask, values: Sequence[Any], names: Sequence[object], where: str
) -> Example:
    """Return an example of its texts and, in a split that has labels, its label.

    Args:
        task: the task.
        values: of its columns.
        names: the labels as the source writes them.
        where: for messages.
    """
    texts = values[: len(task.texts)]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"{where}: {wrong[0]!r} is not text")
    texts = tuple(text.strip() for text in texts)
    if not any(texts):  # one empty text of two is data: QQP has some
        raise ValueError(f"{where}: the text is empty")
    return Example(texts, *(_label(task, value, names, where) for value in values[len(texts) :]))


def _label(task: BenchmarkTask, value: Any, names: Sequence[object], where: str) -> float:  # noqa: ANN401
    accepted = ", ".join(map(str, names)) or f"a number from 0 to {task.scale:g}"
    if value in names:
        return names.index(value)
    with contextlib.suppress(TypeError, ValueError):
        if task.is_regression and 0 <= float(value) <= task.scale:
            return float(value) / task.scale
    raise ValueError(f"{where}: label {value!r}; accepted: {accepted}")


def _from_datasets(task: BenchmarkTask, data: str, split: str) -> Split:
    """Read a split of a dataset with the hub's columns, whose class labels are ids."""
    hub_split = split.replace("dev", "validation")
    place = f"{tables.HUB}{HUB_REPOSITORY}:{task.hub}" if data == HUB else Path(data) / task.hub
    source = f"{place}:{hub_split}"
    rows = tables.load(source)
    columns = [*(task.hub_texts or task.texts), *(["label"] if split not in task.test else [])]
    hint = f"{HUB_REPOSITORY} has {', '.join(columns)}"
    tables.check_columns(source, rows.column_names, columns, hint)
    ids = range(len(task.labels))
    return Split(
        [
            _example(task, [row[column] for column in columns], ids, f"{source}: row {number}")
            for number, row in enumerate(rows.select_columns(columns), start=1)
        ]
    )
