"""What a task's files say: from the original TSV layout, the hub, or a local copy of it.

`read` finds out which, reads a split and refuses what is not in the task's layout. A TSV file is
split on tabs and line feeds and on nothing else: a quotation mark is part of the sentence (CoLA,
MRPC and QQP have single ones), as is U+2028.

DATA is one of
    a folder of TASK/train.tsv, TASK/dev.tsv, TASK/test.tsv   the benchmark's own archive
    a folder of cola/, sst2/, ...                             `datasets`' save_to_disk of each
    "hub"                                                     downloaded by `datasets`
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.glue import DIAGNOSTIC, HUB_REPOSITORY, Task

HUB = "hub"


@dataclasses.dataclass(frozen=True)
class Example:
    """One or two texts and what is to be learned of them."""

    texts: tuple[str, ...]
    label: float = 0
    """The index of a class, or a regression's number as it is learned; 0 where there is none."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The examples of a split, in the file's order."""

    examples: list[Example]
    skipped: int = 0
    """Ragged rows left out of training, where the benchmark's own file has such."""


def read(task: Task, data: str, split: str) -> Split:
    """Every example of a split.

    Args:
        task: says where and how.
        data: see the top of this file.
        split: "train", one of `task.dev`, or one of `task.test`, whose labels nobody knows.

    Raises:
        ValueError: the split is missing or empty, or a row is not in the task's layout; file and
            line are named.
    """
    if data == HUB or (Path(data) / _hub_name(task, split)).is_dir():
        result = _from_datasets(task, data, split)
    else:
        result = _from_tsv(task, _path(task, data, split), split)
    if not result.examples:
        raise ValueError(f"{data}: {task.name} {split}: is empty; accepted: at least one example")
    return result


def digest(splits: Sequence[Split]) -> str:
    """Hex sha256 of the examples: the same wherever they were read from."""
    whole = hashlib.sha256()
    for split in splits:
        for example in split.examples:
            whole.update(json.dumps([*example.texts, round(float(example.label), 6)]).encode())
        whole.update(b"\n")
    return whole.hexdigest()


def _path(task: Task, data: str, split: str) -> Path:
    path = Path(data) / (DIAGNOSTIC if split == DIAGNOSTIC else task.name) / f"{split}.tsv"
    if not path.is_file():
        needed = " and ".join(f"{task.name}/{name}.tsv" for name in ("train", *task.dev))
        raise ValueError(
            f"{path}: no such file; accepted: a folder with {needed} in it, one with a saved "
            f"dataset {task.hub}/, or {HUB}"
        )
    return path


def _from_tsv(task: Task, path: Path, split: str) -> Split:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8: {error}") from error
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not text:
        raise ValueError(f"{path}: is empty; accepted: at least one example")
    labelled = split not in task.test
    header, first = list(task.header), 1
    if not header or not labelled:
        header, first = lines.pop(0).split("\t"), 2
    places = _places(task, header, labelled, path)
    examples, skipped = [], 0
    for number, line in enumerate(lines, start=first):
        columns, place = line.split("\t"), f"{path}: line {number}"
        if len(columns) != len(header):
            if task.skips_ragged and split == "train":
                skipped += 1
                continue
            raise ValueError(
                f"{place}: has {len(columns)} tab-separated columns; accepted: {len(header)}"
            )
        values = [columns[index] for index in places]
        label = _label(task, values.pop(), place) if labelled else 0
        examples.append(_example(values, label, place))
    return Split(examples, skipped)


def _places(task: Task, header: Sequence[str], labelled: bool, path: Path) -> list[int]:
    """Where the texts stand, and last the label where there is one."""
    if not labelled and task.label in header:
        raise ValueError(
            f"{path}: line 1: has labels, in column {task.label!r}; accepted: a test set without "
            "(what has labels is scored as dev)"
        )
    names = [*task.texts, *([task.label] if labelled else [])]
    missing = [name for name in names if name not in header]
    if missing:
        raise ValueError(
            f"{path}: line 1: has no column {', '.join(map(repr, missing))}; accepted: a header "
            f"line that names {', '.join(names)}"
        )
    return [list(header).index(name) for name in names]


def _example(texts: Sequence[str], label: float, place: str) -> Example:
    """An empty text beside another is data: QQP has some."""
    stripped = tuple(text.strip() for text in texts)
    if not any(stripped):
        raise ValueError(f"{place}: the text is empty; accepted: some text")
    return Example(stripped, label)


def _label(task: Task, text: str, place: str) -> float:
    if not task.is_regression:
        if text not in task.labels:
            raise ValueError(f"{place}: label {text!r}; accepted: {', '.join(task.labels)}")
        return task.labels.index(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= task.scale:
        raise ValueError(f"{place}: label {text!r}; accepted: a number from 0 to {task.scale:g}")
    return value / task.scale


def _hub_name(task: Task, split: str) -> str:
    return "ax" if split == DIAGNOSTIC else task.hub


def _from_datasets(task: Task, data: str, split: str) -> Split:
    """A split of a dataset with the hub's columns; a class is an index there, as in `labels`."""
    name = _hub_name(task, split)
    hub_split = "test" if split == DIAGNOSTIC else split.replace("dev", "validation")
    place = f"{data}: {name}: {hub_split}"
    rows = _load(data, name, hub_split, place)
    texts = task.hub_texts or task.texts
    labelled = split not in task.test
    columns = [*texts, *(["label"] if labelled else [])]
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"{place}: has no column {', '.join(map(repr, missing))}; accepted: "
            f"{', '.join(columns)}, as {HUB_REPOSITORY} has"
        )
    examples = []
    for number, row in enumerate(rows.select_columns(columns)):
        where = f"{place}: row {number}"
        label = _hub_label(task, row["label"], where) if labelled else 0
        examples.append(_example([row[column] for column in texts], label, where))
    return Split(examples)


def _load(data: str, name: str, split: str, place: str) -> Any:  # noqa: ANN401 - datasets is untyped
    import datasets

    try:
        if data == HUB:
            return datasets.load_dataset(HUB_REPOSITORY, name, split=split)
        saved = datasets.load_from_disk(str(Path(data) / name))
    except (OSError, ValueError) as error:
        raise ValueError(f"{place}: cannot be loaded: {error}") from error
    if not isinstance(saved, Mapping) or split not in saved:
        have = ", ".join(saved) if isinstance(saved, Mapping) else "one split without a name"
        raise ValueError(f"{place}: no such split; it has {have}")
    return saved[split]


def _hub_label(task: Task, value: float, place: str) -> float:
    if task.is_regression:
        return _label(task, str(value), place)
    if not 0 <= value < task.classes:
        raise ValueError(
            f"{place}: label {value!r}; accepted: 0 to {task.classes - 1} "
            f"({', '.join(task.labels)})"
        )
    return int(value)
