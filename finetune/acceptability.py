"""An acceptability task in CoLA's layout, made from text: sentences against their scrambled selves.

1. `find` finds the plain English sentences of documents.
2. `make` deals the documents out to train and dev, and writes each sentence twice: as it is, and
   with the plain words inside it in another order (`_scrambled`).

Nothing but the order of the words tells the two classes apart: the words that move are lower-case
and carry no punctuation. Each sentence stands in both classes because a small model otherwise
learns which words were in which class, by heart, and nothing of their order. Swapping a single pair
of neighbours is too subtle for a model of minutes: after the demo's pretraining it stays at chance.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data_prep.documents import Document, read
from data_prep.files import write_atomically
from data_prep.inputs import Input
from finetune.glue import TASKS
from pretrain.run.checkpoints import write_json

PROVENANCE = "provenance.json"
"""Beside the splits: says that they are none of the benchmark's, and how they were made."""
TASK = TASKS["CoLA"]

_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Also quoted, marked or joined, as in "built-in", user's, *key*, os.path or close(), and with the
# punctuation of prose after it.
_WORD = re.compile(r"[('\"`*]*\w+(?:['./=-]\w+)*(?:\(\))?['\"`*)]*[,;:]?")
_FEWEST_WORDS, _MOST_WORDS = 6, 25
_FEWEST_MOVABLE = 3
"""Different words that may move: two alone would make no other order than one."""
_PLAIN_SHARE = 0.6
"""Least share of lower-case words without any punctuation: prose, not signatures or tables."""


@dataclasses.dataclass(frozen=True)
class Sentences:
    """The sentences of one document that a task may use."""

    name: str
    """Where the document stands: file name and line."""
    sentences: tuple[str, ...]


def make(documents: Sequence[Sentences], *, train: int, dev: int, seed: int) -> dict[str, str]:
    """The content of the task's files.

    No document has sentences in both splits. The same arguments give the same files.

    Args:
        documents: what `find` found.
        train: sentences of the training split, which has twice as many lines.
        dev: sentences of the dev split, likewise.
        seed: of the split and of the scrambling.

    Returns:
        By split, lines in the task's layout.

    Raises:
        ValueError: too few sentences.
    """
    for name, count in (("--train", train), ("--dev", dev)):
        if count < 1:
            raise ValueError(f"{name} {count}: accepted: 1 or more")
    waiting = sorted(documents, key=lambda document: _draw(seed, "split", *document.sentences))
    files = {}
    for split, wanted in (("dev", dev), ("train", train)):
        rows: list[tuple[str, str]] = []
        while waiting and len(rows) < wanted:
            document = waiting.pop()
            rows += [(document.name, sentence) for sentence in document.sentences]
        if len(rows) < wanted:
            found = sum(len(document.sentences) for document in documents)
            raise ValueError(
                f"{found:,} sentences are too few for --train {train} and --dev {dev}, as no "
                "document may be in both; accepted: fewer, or more text"
            )
        files[split] = "".join(
            f"{name}\t1\t\t{sentence}\n{name}\t0\t*\t{_scrambled(sentence, seed)}\n"
            for name, sentence in rows[:wanted]
        )
    return files


def find(sources: Sequence[Input], exclude: Sequence[Input] = ()) -> list[Sentences]:
    """The sentences of some inputs, each at its first place alone.

    Args:
        sources: inputs that data_prep reads, such as .jsonl.zst files in the Pile's format.
        exclude: inputs whose sentences are left out: what a model was pretrained on.

    Raises:
        ValueError: an input that cannot be read.
    """
    seen = {_key(sentence) for text in _documents(exclude) for sentence in _sentences(text.text)}
    result = []
    for document in _documents(sources):
        new = {_key(sentence): sentence for sentence in _sentences(document.text)}
        kept = tuple(sentence for key, sentence in new.items() if key not in seen)
        seen.update(new)
        if kept:
            name = f"{Path(document.source_file).name}:{document.line}"
            result.append(Sentences(name, kept))
    return result


def write(output: Path, files: Mapping[str, str], numbers: Mapping[str, int]) -> None:
    """Write the task's folder below `output`, with the `numbers` that `make` was given."""
    folder = output / TASK.name
    for split, content in files.items():
        write_atomically(folder / f"{split}.tsv", content.encode())
    made = "sentences against their scrambled selves, in CoLA's layout"
    write_json(folder / PROVENANCE, {"made": made, **numbers})


def _documents(paths: Sequence[Input]) -> Iterator[Document]:
    return (record for path in paths for record in read(path) if isinstance(record, Document))


def _sentences(text: str) -> Iterator[str]:
    for paragraph in _PARAGRAPH_END.split(text):
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if _is_prose(sentence):
                yield sentence


def _is_prose(sentence: str) -> bool:
    words = sentence.removesuffix(".").split(" ")
    movable = {words[place] for place in _movable(words)}
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
    """Places of the words that may change theirs: plain, and neither the first nor the last."""
    return [place for place in range(1, len(words) - 1) if _is_plain(words[place])]


def _scrambled(sentence: str, seed: int) -> str:
    """The sentence with its movable words in another order."""
    words = sentence.split(" ")
    places = _movable(words)
    moved = [words[place] for place in places]
    draw = random.Random(_draw(seed, "scramble", sentence))
    while [words[place] for place in places] == moved:
        draw.shuffle(moved)
    for place, word in zip(places, moved, strict=True):
        words[place] = word
    return " ".join(words)


def _key(sentence: str) -> str:
    return sentence.casefold()


def _draw(seed: int, *parts: str) -> int:
    """A number that depends on the seed and on content alone."""
    text = "\n".join((str(seed), *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
