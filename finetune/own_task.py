"""A task of the user's own: what its files hold, checked and written in one form.

`describe` reads the files, finds out what kind of task it is, and refuses what cannot be trained;
`write` puts the examples into the output folder, where the runs read them. Everything is checked
here, so that an error is found before anything is trained.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.files import strict_json, write_atomically
from data_prep.common.wording import count
from finetune.examples import Example
from finetune.tables import ANSWERS, CONTEXT, QUESTION, TAGS, WORDS, TableRow, read_rows, text
from finetune.task import Kind, Task

NO_ANSWER = "no-answer"
"""The one "label" of a spans task some of whose questions have no answer."""
_MOST_CLASSES = 1000
_SCORES: Mapping[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "classification": (("accuracy", "macro_f1", "matthews"), ("accuracy",)),
    "regression": (("pearson", "spearman", "squared_error"), ("pearson", "spearman")),
    "multi-label": (("micro_f1", "macro_f1", "accuracy"), ("micro_f1",)),
    "tags": (("entity_f1", "entity_precision", "entity_recall", "tag_accuracy"), ("entity_f1",)),
    "spans": (("exact_match", "overlap_f1"), ("overlap_f1",)),
}
"""Every score of a kind, the main one first, and those that choose the best epoch."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for."""

    name: str
    train: str
    """A file or data set, see tables.py."""
    dev: str = ""
    """Empty: `dev_share` of train."""
    test: str = ""
    """A further labelled set, which is scored and chooses nothing; empty: none."""
    texts: tuple[str, ...] = ()
    """Columns of one or two texts; empty: those of a CoNLL or SQuAD file, or the column "text"."""
    label: str = "label"
    kind: Kind | None = None
    """None: what the labels look like."""
    separator: str = ";"
    """Between the labels of a multi-label task in a CSV or TSV file."""
    dev_share: float = 0.1


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """A task with its examples."""

    task: Task
    splits: Mapping[str, list[Example]]
    summary: list[str]
    """What was found, in lines for the screen."""


def describe(request: Request) -> OwnTask:
    """Read the files of a task and find out what they hold.

    Raises:
        ValueError: a file or column is missing, a text is empty, a label is missing or of another
            kind, or only dev has it; names file, line and what would be accepted.
    """
    names = {"train": request.train, "dev": request.dev, "test": request.test}
    rows = {split: read_rows(source) for split, source in names.items() if source}
    request = _with_columns(request, rows["train"][0])
    for found in rows.values():
        _refuse_missing_columns(request, found)
    kind = request.kind or _kind_of(request, rows["train"])
    labels = {
        split: [_label_of(kind, request, row) for row in found] for split, found in rows.items()
    }
    known = _names_of(kind, labels["train"])
    _refuse_unknown(kind, known, rows, labels)
    examples = {
        split: [
            Example(_texts_of(kind, request, row), _id_of(kind, known, label))
            for row, label in zip(found, labels[split], strict=True)
        ]
        for split, found in rows.items()
    }
    if "dev" not in examples:
        examples |= _divided(examples["train"], request.dev_share, kind)
    metrics, official = _SCORES[kind]
    splits: dict[str, list[Example]] = {
        name: examples[name] for name in ("train", "dev", "test") if name in examples
    }
    dev = tuple(name for name in splits if name != "train")
    scale = _scale(labels["train"]) if kind == "regression" else 1.0
    task = Task(
        request.name, kind, request.texts, request.label, known, metrics, official, dev, scale
    )
    if kind == "regression":
        splits = {
            name: [dataclasses.replace(e, label=e.label / scale) for e in each]
            for name, each in splits.items()
        }
    return OwnTask(task, splits, list(_summary(task, splits, request, labels["train"])))


def write(folder: Path, own: OwnTask) -> Path:
    """Write the examples, a file a split, in the form that `examples.read_split` reads.

    Returns:
        A folder below `folder` that is named after a hash of the examples: other ones of an earlier
        call stay for the runs that read them.
    """
    files = {
        f"{split}.jsonl": "".join(
            strict_json(dataclasses.asdict(example)) + "\n" for example in found
        ).encode()
        for split, found in own.splits.items()
    }
    data = folder / hashlib.blake2b(b"\0".join(files.values()), digest_size=6).hexdigest()
    (data / own.task.name).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(data / own.task.name / name, content)
    return data


def _with_columns(request: Request, row: TableRow) -> Request:
    """Return the request with the columns that CoNLL and SQuAD files have, unless it names some."""
    columns = row.values.keys()
    if ANSWERS in columns and not request.texts:
        return dataclasses.replace(
            request, texts=(QUESTION, CONTEXT), label=ANSWERS, kind=request.kind or "spans"
        )
    if WORDS in columns and not request.texts:
        label = request.label if request.label in columns else TAGS
        return dataclasses.replace(
            request, texts=(WORDS,), label=label, kind=request.kind or "tags"
        )
    return request if request.texts else dataclasses.replace(request, texts=("text",))


def _refuse_missing_columns(request: Request, rows: Sequence[TableRow]) -> None:
    for row in rows:
        columns = [*request.texts, request.label]
        if missing := [column for column in columns if column not in row.values]:
            raise ValueError(
                f"{row.place}: has no column {', '.join(map(repr, missing))}; it has "
                f"{', '.join(map(str, row.values))}. Name yours with --text and --label"
            )


def _kind_of(request: Request, rows: Sequence[TableRow]) -> Kind:
    """Return what the labels look like: lists, numbers that are not whole, or names."""
    values = [row.values[request.label] for row in rows]
    if any(isinstance(value, list) for value in values):
        listed = isinstance(rows[0].values[request.texts[0]], list)
        return "tags" if listed else "multi-label"
    numbers = [_number(value) for value in values]
    if all(map(math.isfinite, numbers)) and not all(number.is_integer() for number in numbers):
        return "regression"
    return "classification"


def _number(value: Any) -> float:  # noqa: ANN401 - of any table
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _texts_of(kind: Kind, request: Request, row: TableRow) -> tuple[str, ...]:
    values = [row.values[column] for column in request.texts]
    if kind == "tags":
        return tuple(map(str, values[0]))
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise ValueError(f"{row.place}: {wrong[0]!r} is not text")
    # Where spans are counted in characters, the text stays as it is.
    texts = tuple(value if kind == "spans" else value.strip() for value in values)
    if not all(text.strip() for text in texts):
        empty = next(c for c, text in zip(request.texts, texts, strict=True) if not text.strip())
        raise ValueError(f"{row.place}: column {empty!r} is empty; give a text, or leave it out")
    return texts


def _label_of(kind: Kind, request: Request, row: TableRow) -> Any:  # noqa: ANN401
    """Return a row's label: a name, a number, names, or spans, as the kind has it."""
    value = row.values[request.label]
    if kind == "regression":
        number = _number(value)
        if not math.isfinite(number):
            raise ValueError(f"{row.place}: column {request.label!r}: {value!r} is not a number")
        return number
    if kind == "multi-label":
        parts = value if isinstance(value, list) else str(value).split(request.separator)
        return tuple(dict.fromkeys(filter(None, map(text, parts))))
    if kind in ("tags", "spans"):
        return _tags_of(request, row) if kind == "tags" else _spans_of(request, row)
    if not (label := text(value)):
        raise ValueError(f"{row.place}: column {request.label!r} is empty; give each row a label")
    return label


def _tags_of(request: Request, row: TableRow) -> tuple[str, ...]:
    words, tags = row.values[request.texts[0]], row.values[request.label]
    if not isinstance(tags, list) or not isinstance(words, list) or not words:
        raise ValueError(f"{row.place}: not a list of words and one of tags")
    if len(tags) != len(words):
        raise ValueError(f"{row.place}: has {len(words)} words and {len(tags)} tags")
    return tuple(map(text, tags))


def _spans_of(request: Request, row: TableRow) -> tuple[tuple[int, int], ...]:
    """Return first and next character of each answer, which must stand where it is said to."""
    context, answers = row.values[request.texts[1]], row.values[request.label]
    if isinstance(answers, dict):  # as the hub's SQuAD has them
        answers = list(zip(answers["text"], answers["answer_start"], strict=True))
    for answer, start in answers:
        if context[start : start + len(answer)] != answer:
            raise ValueError(
                f"{row.place}: the answer {answer!r} is not in the context at character {start}, "
                f"where {context[start : start + len(answer)]!r} is"
            )
    return tuple((start, start + len(answer)) for answer, start in answers)


def _names_of(kind: Kind, labels: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of labels, in an order that does not depend on that of the rows."""
    if kind == "regression":
        return ()
    if kind == "spans":
        return () if all(labels) else (NO_ANSWER,)
    found = set(labels) if kind == "classification" else {each for row in labels for each in row}
    if all(name.lstrip("-").isdecimal() for name in found):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def _refuse_unknown(
    kind: Kind,
    known: Sequence[str],
    rows: Mapping[str, Sequence[TableRow]],
    labels: Mapping[str, Sequence[Any]],
) -> None:
    """Refuse labels that train does not have, and too few or too many of them."""
    if kind in ("regression", "spans"):
        return
    first = rows["train"][0].place
    if len(known) < 2:
        raise ValueError(f"{first}: every example has the label {', '.join(known)!r}; give several")
    if len(known) > _MOST_CLASSES:
        raise ValueError(
            f"{first}: has {len(known):,} different labels; for numbers write --regression"
        )
    for split, of_split in labels.items():
        for row, label in zip(rows[split], of_split, strict=True):
            own = (label,) if kind == "classification" else label
            if wrong := [each for each in own if each not in known]:
                raise ValueError(
                    f"{row.place}: label {wrong[0]!r} is not in the training data, which has "
                    f"{', '.join(known[:20])}{' ...' if len(known) > 20 else ''}"
                )


def _id_of(kind: Kind, known: Sequence[str], label: Any) -> Any:  # noqa: ANN401
    if kind in ("regression", "spans"):
        return label
    ids = {name: number for number, name in enumerate(known)}
    return ids[label] if kind == "classification" else tuple(ids[each] for each in label)


def _scale(labels: Sequence[float]) -> float:
    """Return what a regression divides its labels by: the largest, if it is above 1."""
    return max(1.0, *map(abs, labels))


def _divided(examples: Sequence[Example], share: float, kind: Kind) -> dict[str, list[Example]]:
    """Divide examples into train and dev by a hash of their texts: equal ones stay together.

    Every class keeps an example in train.
    """
    if not 0 < share < 1:
        raise ValueError(f"--dev-share {share}: accepted: above 0 and below 1")
    order = sorted(examples, key=_hash)
    size = max(1, round(share * len(examples)))
    dev: list[Example] = []
    left = Counter(e.label for e in examples if kind == "classification")
    chosen: set[bytes] = set()
    for example in order:
        if len(dev) >= size and _hash(example) not in chosen:
            break
        if kind == "classification" and left[example.label] <= 1:
            continue
        left[example.label] -= 1
        chosen.add(_hash(example))
        dev.append(example)
    in_dev = Counter(map(id, dev))
    train = [example for example in examples if id(example) not in in_dev]
    if not train or not dev:
        raise ValueError(f"{count(len(examples), 'example')} are too few to divide; give --dev")
    return {"train": train, "dev": [example for example in examples if id(example) in in_dev]}


def _hash(example: Example) -> bytes:
    return hashlib.blake2b("\0".join(example.texts).encode(), digest_size=16).digest()


def _summary(
    task: Task, splits: Mapping[str, list[Example]], request: Request, labels: Sequence[Any]
) -> Iterator[str]:
    sizes = ", ".join(f"{len(found):,} {name}" for name, found in splits.items())
    taken = "" if request.dev else f" (dev is {request.dev_share:.0%} of train)"
    how = "" if request.kind else " (by its labels; --kind names another)"
    yield f"{task.name}: {task.kind}{how}, {sizes}{taken}"
    if task.kind == "regression":
        yield f"  {request.label}: numbers from {min(labels):g} to {max(labels):g}"
    elif task.kind == "spans":
        yield f"  questions without an answer: {sum(not spans for spans in labels):,}"
    else:
        counts = _counts(task, splits["train"])
        shown = ", ".join(f"{name} {number:,}" for name, number in counts.most_common(20))
        yield f"  {request.label}: {shown}{' ...' if len(counts) > 20 else ''}"
        if rare := [name for name in task.labels if counts[name] <= 1]:
            yield f"  WARNING: at most one training example of {', '.join(rare)}"
    seen = {_hash(example) for example in splits["train"]}
    for name in task.dev:
        if shared := sum(_hash(example) in seen for example in splits[name]):
            yield f"  WARNING: {shared:,} texts of {name} are in train as well"


def _counts(task: Task, examples: Sequence[Example]) -> Counter[str]:
    ids = ([e.label] if task.kind == "classification" else e.label for e in examples)
    return Counter(task.labels[number] for own in ids for number in own)
