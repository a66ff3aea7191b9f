"""A custom task: read the user's files, check them and write the examples in one form.

`describe` reads the files, infers the kind of task and rejects bad rows; `write` writes the
examples into the output folder, where the runs read them. Everything is checked here, before any
training.
"""

import dataclasses
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.files import json_lines, write_atomically
from data_prep.common.records import check_value
from data_prep.common.wording import count, few
from finetune.examples import Example
from finetune.tables import TableRow, check_columns, read_rows, text
from finetune.tasks import TASKS, Kind, Task

_MOST_CLASSES = 1000
_ALMOST_NUMBER = re.compile(r"[-+]?(\d*,\d+|nan|inf|infinity)", re.IGNORECASE)
"""A malformed number, such as "3,5" or "nan": hardly the name of a class."""
_SCORES: Mapping[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "classification": (("accuracy", "macro_f1", "matthews"), ("accuracy",)),
    "regression": (("pearson", "spearman", "squared_error"), ("pearson", "spearman")),
}
"""Scores by kind, the main one first, and those that choose the best epoch."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The user's options."""

    name: str
    train: str
    """A file or data set, see tables.py."""
    dev: str = ""
    """Empty: `dev_share` of train."""
    test: str = ""
    """A further labelled set, which is only scored; empty: none."""
    texts: tuple[str, ...] = ("text",)
    """Columns of the texts of an example, of which there are one or two."""
    label: str = "label"
    kind: Kind | None = None
    """None: inferred from the labels."""
    dev_share: float = 0.1


@dataclasses.dataclass(frozen=True)
class CustomTask:
    """A task with its examples."""

    task: Task
    splits: Mapping[str, list[Example]]
    summary: list[str]
    """Lines to print."""


def describe(request: Request) -> CustomTask:
    """Read and check the files of a task.

    Raises:
        ValueError: a file or column is missing, a text is empty, a label is missing or of another
            kind, or only dev has it; names file, line and what would be accepted. Or there are
            three texts, or the name is not that of a folder, or that of a task of GLUE.
    """
    fits = re.fullmatch(r"\w[\w .-]*", request.name) and request.name not in TASKS
    accepted = "of letters, digits, spaces, '.', '-' and '_', and no name of a task of GLUE"
    check_value("--name", request.name, bool(fits), accepted)
    columns = " ".join(request.texts)
    check_value("--text", columns, len(request.texts) <= 2, "one column, or two for pairs")
    sources = {"train": request.train, "dev": request.dev, "test": request.test}
    rows = {split: read_rows(source) for split, source in sources.items() if source}
    for row in itertools.chain(*rows.values()):
        hint = f"it has {', '.join(map(str, row.values))}. Name yours with --text and --label"
        check_columns(row.place, row.values, [*request.texts, request.label], hint)
    kind = request.kind or _kind_of(request, rows["train"])
    names = _names(request, rows["train"]) if kind == "classification" else ()
    numbers = [_number_of(request, row) for row in rows["train"]] if kind == "regression" else []
    scale = max([1.0, *map(abs, numbers)])
    metrics, official = _SCORES[kind]
    task = Task(
        request.name, kind, request.texts, request.label, names, metrics, official, (), scale
    )
    splits = {
        split: [Example(_texts_of(request, row), _label_of(task, request, row)) for row in found]
        for split, found in rows.items()
    }
    if "dev" not in splits:
        train, dev = _divided(splits.pop("train"), request.dev_share, kind)
        splits = {"train": train, "dev": dev, **splits}
    task = dataclasses.replace(task, dev=tuple(name for name in splits if name != "train"))
    return CustomTask(task, splits, list(_summary(task, splits, request)))


def write(folder: Path, own: CustomTask) -> Path:
    """Write one file per split, in the form that `examples.read_split` reads.

    Returns:
        A subfolder named after a hash of the examples. The subfolders of earlier calls remain for
        their runs.
    """
    files = {
        f"{split}.jsonl": json_lines(map(dataclasses.asdict, found))
        for split, found in own.splits.items()
    }
    data = folder / hashlib.blake2b(b"\0".join(files.values()), digest_size=6).hexdigest()
    (data / own.task.name).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(data / own.task.name / name, content)
    return data


def _kind_of(request: Request, rows: Sequence[TableRow]) -> Kind:
    """Infer the kind: "regression" if all labels are numbers, and not all of them whole.

    Raises:
        ValueError: all labels are numbers except malformed ones (`_ALMOST_NUMBER`).
    """
    numbers = [_number(row.values[request.label]) for row in rows]
    others = [row for row, n in zip(rows, numbers, strict=True) if not math.isfinite(n)]
    if others:
        if all(_ALMOST_NUMBER.fullmatch(text(row.values[request.label])) for row in others):
            _number_of(request, others[0])
        return "classification"
    return "classification" if all(number.is_integer() for number in numbers) else "regression"


def _number(value: Any) -> float:  # noqa: ANN401 - of any table
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _number_of(request: Request, row: TableRow) -> float:
    """Return the label of a regression."""
    value = row.values[request.label]
    if not math.isfinite(number := _number(value)):
        raise ValueError(
            f"{row.place}: column {request.label!r}: {value!r} is not a number; write it as 3.5, "
            "leave the row out, or take labels as names with --kind classification"
        )
    return number


def _name_of(request: Request, row: TableRow) -> str:
    """Return the label of a classification."""
    value = row.values[request.label]
    if isinstance(value, list | dict | bytes):
        raise ValueError(
            f"{row.place}: column {request.label!r}: {value!r} is not one label; an example has "
            "one class or one number"
        )
    if not (name := text(value)):
        raise ValueError(f"{row.place}: column {request.label!r} is empty; give each row a label")
    return name


def _names(request: Request, rows: Sequence[TableRow]) -> tuple[str, ...]:
    """Return the classes of the training data, in an order independent of the rows."""
    names = {_name_of(request, row) for row in rows}
    if len(names) < 2:
        raise ValueError(
            f"{rows[0].place}: every example has the label {min(names)!r}; give several"
        )
    if len(names) > _MOST_CLASSES:
        raise ValueError(
            f"{rows[0].place}: has {len(names):,} different labels; for numbers write --kind "
            "regression"
        )
    are_numbers = all(name.removeprefix("-").isdecimal() for name in names)
    # By name first: "1" and "01" are the same number, and a set has an order of each process.
    return tuple(sorted(sorted(names), key=int if are_numbers else str))


def _texts_of(request: Request, row: TableRow) -> tuple[str, ...]:
    texts = []
    for column in request.texts:
        value = row.values[column]
        if not isinstance(value, str):
            raise ValueError(f"{row.place}: {value!r} is not text")
        if not value.strip():
            raise ValueError(
                f"{row.place}: column {column!r} is empty; give a text, or leave it out"
            )
        texts.append(value.strip())
    return tuple(texts)


def _label_of(task: Task, request: Request, row: TableRow) -> float:
    """Return a class id, or the number that a regression learns."""
    if task.is_regression:
        return _number_of(request, row) / task.scale
    if (name := _name_of(request, row)) not in task.labels:
        raise ValueError(
            f"{row.place}: label {name!r} is not in the training data, which has "
            f"{few(task.labels, 20)}"
        )
    return task.labels.index(name)


def _divided(
    examples: Sequence[Example], share: float, kind: Kind
) -> tuple[list[Example], list[Example]]:
    """Split examples into train and dev by a hash of their texts; equal texts stay together.

    Dev has the same share of every class, or less where texts are equal, and train keeps an example
    of each.
    """
    check_value("--dev-share", share, 0 < share < 1, "above 0 and below 1")
    classes = [e.label if kind == "classification" else 0 for e in examples]
    total, size = len(examples), max(1, round(share * len(examples)))
    left, wanted, seen = Counter(classes), Counter[float](), 0
    for label, number in sorted(left.items(), key=lambda each: (-each[1], each[0])):
        # Rounded so that the sum over the classes is `size`.
        before, seen = (size * seen + total // 2) // total, seen + number
        wanted[label] = (size * seen + total // 2) // total - before
    equal: dict[bytes, list[int]] = {}
    for number, example in enumerate(examples):
        equal.setdefault(_hash(example), []).append(number)
    in_dev: set[int] = set()
    for _, numbers in sorted(equal.items()):
        found = Counter(classes[number] for number in numbers)
        if all(wanted[label] >= number < left[label] for label, number in found.items()):
            left, wanted = left - found, wanted - found
            in_dev.update(numbers)
    if not in_dev:
        lack = "too few different texts to divide; give --dev, or a larger --dev-share"
        raise ValueError(f"{count(total, 'example')}: {lack}")
    train = [example for number, example in enumerate(examples) if number not in in_dev]
    return train, [examples[number] for number in sorted(in_dev)]


def _hash(example: Example) -> bytes:
    return hashlib.blake2b("\0".join(example.texts).encode(), digest_size=16).digest()


def _summary(task: Task, splits: Mapping[str, list[Example]], request: Request) -> Iterator[str]:
    sizes = ", ".join(f"{len(found):,} {name}" for name, found in splits.items())
    share = len(splits["dev"]) / (len(splits["train"]) + len(splits["dev"]))
    taken = "" if request.dev else f" (dev is {share:.0%} of them)"
    how = "" if request.kind else " (by its labels; --kind names another)"
    yield f"{task.name}: {task.kind}{how}, {sizes}{taken}"
    if task.is_regression:
        numbers = [example.label * task.scale for example in splits["train"]]
        yield f"  {request.label}: numbers from {min(numbers):g} to {max(numbers):g}"
    else:
        counts = Counter(task.labels[int(e.label)] for e in splits["train"])
        shown = few((f"{name} {number:,}" for name, number in counts.most_common()), 20)
        yield f"  {request.label}: {shown}"
        if rare := [name for name in task.labels if counts[name] <= 1]:
            yield f"  WARNING: labels with at most one training example: {', '.join(rare)}"
    seen = {_hash(example) for example in splits["train"]}
    for name in task.dev:
        if shared := sum(_hash(example) in seen for example in splits[name]):
            yield f"  WARNING: {shared:,} texts of {name} are in train as well"
