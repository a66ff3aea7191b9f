"""The text of the task, one document a line: its character vocabulary, and the prepared corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common.files import write_atomically
from data_prep.documents import Reject, read_documents

if TYPE_CHECKING:
    from data_prep.tokenizer import Tokenizer


def documents(path: Path) -> list[str]:
    """Read the lines of a text file that are not blank.

    Raises:
        ValueError: there is no text, or a line is not UTF-8; the line is named.
    """
    texts = list[str]()
    for record in read_documents(f"lines:{path}"):
        if not isinstance(record, Reject):
            texts += [record.text] if record.text else []
        elif record.reason != "empty":
            raise ValueError(f"{path}: line {record.line}: {record.reason}; it must be UTF-8")
    if not texts:
        raise ValueError(f"{path}: has no text")
    return texts


def vocabulary(texts: Sequence[str]) -> Tokenizer:
    """Make the vocabulary of the characters of documents and of the question."""
    from data_prep.tokenizer import train_characters

    return train_characters([*texts, "Where was  born?"])


def prepare(name: str, texts: Sequence[str], folder: Path) -> Path:
    """Make the corpus that pretraining reads, or find it where an earlier call made it.

    Validation reads the same documents as training: the facts of every document are needed.

    Args:
        name: of the text. The corpus is also named after a hash of the documents.
        texts: the documents.
        folder: for the corpora of all texts.

    Returns:
        The corpus.
    """
    from data_prep.manifest import Settings
    from data_prep.run import prepare as prepare_corpus
    from data_prep.tokenizer import FILE_NAME

    content = "".join(f"{text}\n" for text in texts).encode()
    folder /= f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    copies = [folder / "train.txt", folder / "valid.txt"]  # splits may not share an input
    for copy in copies:
        if not copy.is_file():
            write_atomically(copy, content)
    vocabulary(texts).save(folder / FILE_NAME)
    train, valid = ([f"lines:{copy}"] for copy in copies)
    settings, corpus = Settings(valid_fraction=0.0), folder / "corpus"
    prepare_corpus(train, corpus, folder / FILE_NAME, settings, valid_inputs=valid)
    return corpus
