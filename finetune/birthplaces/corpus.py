"""The text of the task, one document a line: its character vocabulary, and the prepared corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.documents import Document, read
from data_prep.files import write_atomically

if TYPE_CHECKING:
    from data_prep.tokenizer import Tokenizer

QUESTION = "Where was {} born?"
"""What is asked of a person."""


def documents(path: Path) -> list[str]:
    """Read the lines of a text file that are not blank.

    Raises:
        ValueError: no such file, no text, or a line that is not UTF-8; the line is named.
    """
    texts = list[str]()
    for record in read(f"lines:{path}"):
        if not isinstance(record, Document):
            raise ValueError(
                f"{path}: line {record.line}: {record.reason}; accepted: one document per line, in "
                "UTF-8"
            )
        if record.text:
            texts.append(record.text)
    if not texts:
        raise ValueError(f"{path}: has no text; accepted: one document per line")
    return texts


def vocabulary(texts: Sequence[str]) -> Tokenizer:
    """Make the vocabulary of the characters of documents and of the question."""
    from data_prep.tokenizer import train_characters

    return train_characters([*texts, QUESTION.format("")])


def refuse_other_vocabulary(model: Path, tokenizer: Tokenizer, path: Path) -> None:
    """Refuse a text whose character vocabulary is not that of a model.

    Raises:
        ValueError: the vocabularies differ; the numbers of ids and some characters are named.
    """
    ours = vocabulary(documents(path))
    if ours.digest() == tokenizer.digest():
        return
    sets = [{each.token_text(id) for id in range(4, each.mask_id)} for each in (ours, tokenizer)]
    differing = "".join(sorted(sets[0] ^ sets[1])[:5])
    raise ValueError(
        f"{path}: its vocabulary of {ours.vocab_size} ids is not that of {model}, which has "
        f"{tokenizer.vocab_size} (only one has {differing!r}); accepted: the text that the model "
        "was pretrained on"
    )


def prepare(name: str, texts: Sequence[str], folder: Path) -> Path:
    """Make the corpus that pretraining reads, or find it where an earlier call made it.

    Validation reads the same documents as training: the facts of every document are needed.

    Args:
        name: of the text.
        texts: the documents.
        folder: for the corpora of all texts.

    Returns:
        The corpus, in a folder that is named after the text and a hash of it.
    """
    from data_prep.manifest import Settings
    from data_prep.run import prepare as prepare_corpus
    from data_prep.tokenizer import FILE_NAME

    content = "".join(f"{text}\n" for text in texts).encode()
    parent = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    copies = [parent / "train.txt", parent / "valid.txt"]  # splits may not share an input
    for copy in copies:
        if not copy.is_file():
            write_atomically(copy, content)
    vocabulary(texts).save(parent / FILE_NAME)
    train, valid = ([f"lines:{copy}"] for copy in copies)
    corpus = parent / "corpus"
    settings = Settings(valid_fraction=0.0)
    prepare_corpus(train, corpus, parent / FILE_NAME, settings, valid_inputs=valid)
    return corpus
