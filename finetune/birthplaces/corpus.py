"""The text of the task, one document a line: its character vocabulary, and the prepared corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common.files import write_atomically
from data_prep.documents import Document, read_documents

if TYPE_CHECKING:
    from data_prep.tokenizer import Tokenizer

QUESTION = "Where was {} born?"
"""What is asked of a person."""


def documents(path: Path) -> list[str]:
    """Read the lines of a text file that are not blank.

    Raises:
        ValueError: no such file, no text, or a line that is not UTF-8; the line is named.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    texts = list[str]()
    for record in read_documents(f"lines:{path}"):
        if isinstance(record, Document):
            texts += [record.text] if record.text else []
        elif record.reason != "empty":
            raise ValueError(
                f"{path}: line {record.line}: {record.reason}; each line must be a document in "
                "UTF-8"
            )
    if not texts:
        raise ValueError(f"{path}: has no text")
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
        f"{tokenizer.vocab_size} (only one has {differing!r}); give the text that the model was "
        "pretrained on"
    )


def folder_of(name: str, texts: Sequence[str], folder: Path) -> Path:
    """Return the folder of the corpus of a text: it is named after the text and a hash of it.

    Args:
        name: of the text.
        texts: the documents.
        folder: for the corpora of all texts.
    """
    return folder / f"{name}-{hashlib.sha256(_content(texts)).hexdigest()[:12]}"


def _content(texts: Sequence[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def prepare(texts: Sequence[str], folder: Path) -> Path:
    """Make the corpus that pretraining reads, or find it where an earlier call made it.

    Validation reads the same documents as training: the facts of every document are needed.

    Args:
        texts: the documents.
        folder: where `folder_of` says.

    Returns:
        The corpus.
    """
    from data_prep.manifest import Settings
    from data_prep.run import prepare as prepare_corpus
    from data_prep.tokenizer import FILE_NAME

    content = _content(texts)
    copies = [folder / "train.txt", folder / "valid.txt"]  # splits may not share an input
    for copy in copies:
        if not copy.is_file():
            write_atomically(copy, content)
    vocabulary(texts).save(folder / FILE_NAME)
    train, valid = ([f"lines:{copy}"] for copy in copies)
    corpus = folder / "corpus"
    settings = Settings(valid_fraction=0.0)
    prepare_corpus(train, corpus, folder / FILE_NAME, settings, valid_inputs=valid)
    return corpus
