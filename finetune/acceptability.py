"""An acceptability task in CoLA's layout, made from any text.

1. `find` finds plain English sentences in documents.
2. `make` splits the documents into train and dev, and writes each sentence twice: intact, and with
   the plain words inside it in another order (`_scrambled`).

Only the order of the words tells the classes apart: the words that move are lower-case and have no
punctuation. Each sentence is in both classes, because a small model otherwise memorizes which words
belong to which class and learns nothing about their order. Swapping one pair of neighbours is too
subtle for a model of minutes: after the demo's pretraining it stays at chance.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data_prep.common.files import write_atomically, write_json
from data_prep.documents import Document, read_documents
from data_prep.inputs import Input
from finetune.glue import TASKS

PROVENANCE = "provenance.json"
"""A file beside the splits that says how they were made; the benchmark's own data has none."""
TASK = TASKS["CoLA"]

_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Also quoted, emphasized or joined, as in "built-in", user's, *key*, os.path or close(), and with
# punctuation after it.
_WORD = re.compile(r"[('\"`*]*\w+(?:['./=-]\w+)*(?:\(\))?['\"`*)]*[,;:]?")
_FEWEST_WORDS, _MOST_WORDS = 6, 25
_FEWEST_MOVABLE = 3
"""Different words that may move: with two there would be only one other order."""
_PLAIN_SHARE = 0.6
"""Least share of plain words, so that signatures and tables are left out."""


@dataclasses.dataclass(frozen=True)
class Sentences:
    """The usable sentences of one document."""

    name: str
    """File name and line of the document."""
    sentences: tuple[str, ...]


def make(documents: Sequence[Sentences], *, train: int, dev: int, seed: int) -> dict[str, str]:
    """Return the content of the task's files by split.

    No document has sentences in both splits. The same arguments give the same files.

    Args:
        documents: the result of `find`.
        train: number of training sentences; the file has twice as many lines.
        dev: number of dev sentences, likewise.
        seed: seed of the split and of the scrambling.

    Raises:
        ValueError: there are too few sentences.
    """
    for name, count in (("--train", train), ("--dev", dev)):
        if count < 1:
            raise ValueError(f"{name} {count}: accepted: 1 or more")
    waiting = sorted(documents, key=lambda document: _hash(seed, "split", *document.sentences))
    files = {}
    for split, wanted in (("dev", dev), ("train", train)):
        rows: list[tuple[str, str]] = []
        while waiting and len(rows) < wanted:
            document = waiting.pop()
            rows += [(document.name, sentence) for sentence in document.sentences]
        if len(rows) < wanted:
            found = sum(len(document.sentences) for document in documents)
            raise ValueError(
                f"{found:,} sentences are too few for --train {train} and --dev {dev}, because no "
                "document may be in both splits; ask for fewer, or give more text"
            )
        files[split] = "".join(
            f"{name}\t1\t\t{sentence}\n{name}\t0\t*\t{_scrambled(sentence, seed)}\n"
            for name, sentence in rows[:wanted]
        )
    return files


def find(sources: Sequence[Input], exclude: Sequence[Input] = ()) -> list[Sentences]:
    """Return the sentences of the inputs by document; a repeated sentence counts once.

    Args:
        sources: inputs that data_prep reads, such as .jsonl.zst files in the Pile's format.
        exclude: inputs whose sentences are left out, such as the pretraining data.

    Raises:
        ValueError: an input cannot be read.
    """
    seen = {
        sentence.casefold() for text in _documents(exclude) for sentence in _sentences(text.text)
    }
    result = []
    for document in _documents(sources):
        new = {sentence.casefold(): sentence for sentence in _sentences(document.text)}
        kept = tuple(sentence for key, sentence in new.items() if key not in seen)
        seen.update(new)
        if kept:
            name = f"{Path(document.source_file).name}:{document.line}"
            result.append(Sentences(name, kept))
    return result


def task_folder(output: Path) -> Path:
    """Return the task's folder below `output`.

    Raises:
        ValueError: it has TSV files that `write` did not write, such as the benchmark's own.
    """
    folder = output / TASK.name
    if not (folder / PROVENANCE).is_file():
        for file in sorted(folder.glob("*.tsv")):
            raise ValueError(f"{file}: was not written by acceptability; choose another --output")
    return folder


def write(folder: Path, files: Mapping[str, str], numbers: Mapping[str, int]) -> None:
    """Write the task's files.

    Args:
        folder: the result of `task_folder`.
        files: the result of `make`.
        numbers: those that were passed to `make`.
    """
    # First, so that no files are without it after an interruption.
    made = "intact against scrambled sentences, in CoLA's layout"
    write_json(folder / PROVENANCE, {"made": made, **numbers})
    for split, content in files.items():
        write_atomically(folder / f"{split}.tsv", content.encode())


def _documents(paths: Sequence[Input]) -> Iterator[Document]:
    return (
        record for path in paths for record in read_documents(path) if isinstance(record, Document)
    )


def _sentences(text: str) -> Iterator[str]:
    for paragraph in _PARAGRAPH_END.split(text):
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if _is_prose(sentence):
                yield sentence


def _is_prose(sentence: str) -> bool:
    words = sentence.removesuffix(".").split(" ")
    movable = {words[index] for index in _movable(words)}
    return (
        sentence.endswith(".")
        and sentence[0].isupper()
        and _FEWEST_WORDS <= len(words) <= _MOST_WORDS
        and all(_WORD.fullmatch(word) for word in words)
        and len(movable) >= _FEWEST_MOVABLE
        and sum(_is_plain(word) for word in words) >= _PLAIN_SHARE * len(words)
    )


def _is_plain(word: str) -> bool:
    return word.isalpha() and word.islower()


def _movable(words: Sequence[str]) -> list[int]:
    """Return the indices of the words that may move: plain, and neither first nor last."""
    return [index for index in range(1, len(words) - 1) if _is_plain(words[index])]


def _scrambled(sentence: str, seed: int) -> str:
    """Return the sentence with its movable words in another order."""
    words = sentence.split(" ")
    indices = _movable(words)
    moved = [words[index] for index in indices]
    generator = random.Random(_hash(seed, "scramble", sentence))
    while [words[index] for index in indices] == moved:
        generator.shuffle(moved)
    for index, word in zip(indices, moved, strict=True):
        words[index] = word
    return " ".join(words)


def _hash(seed: int, *parts: str) -> int:
    text = "\n".join((str(seed), *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
