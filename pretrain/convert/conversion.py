"""From one form of a model to another, by way of `ModelContents`.

zeroclap      a model folder: what `export` makes and every other command takes
fairseq       a checkpoint (.pt) of fairseq, or of EIFY/fairseq
huggingface   a folder that `transformers` loads
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from data_prep import tokenizer as tokenizers
from pretrain.convert import fairseq_export, fairseq_import, huggingface_export, huggingface_import
from pretrain.inference import model_folder
from pretrain.inference.model_folder import ModelContents

FORMS = ("zeroclap", "fairseq", "huggingface")


def convert(
    source: Path, form: str, output: Path, tokenizer: str | None = None, head: str | None = None
) -> list[str]:
    """Write a model in another form; `source`'s own is found out.

    Args:
        source: a model folder, a fairseq checkpoint, or a Hugging Face folder.
        form: one of FORMS.
        output: the file (fairseq) or folder to make; it must not exist.
        tokenizer: the vocabulary of a source that has none, as `data_prep.tokenizer.load` takes it.
        head: for Hugging Face, the classification head to export in place of the language model's.

    Returns:
        What the user should know, a line each.

    Raises:
        ValueError: what is wrong, with the file's name; nothing has been written then.
    """
    if head is not None and form != "huggingface":
        raise ValueError(f"--head {head}: --to {form} takes every head; leave it out")
    contents = read(source, tokenizer)
    notes = list(contents.provenance.get("notes", []))
    if contents.vocabulary is None:
        notes.append(_no_vocabulary(source))
    if form == "fairseq":
        fairseq_export.write(output, contents)
    elif form == "huggingface":
        notes += huggingface_export.write(output, contents, head)
    else:
        model_folder.save(output, contents)
    return notes


def read(source: Path, tokenizer: str | None = None) -> ModelContents:
    """The model that a file or a folder holds, whatever its form.

    Raises:
        ValueError: there is none, it is damaged, or it has a vocabulary and another one is given.
    """
    vocabulary = tokenizers.load(tokenizer) if tokenizer else None
    if source.is_file():
        return fairseq_import.read(source, vocabulary)
    if (source / "model.json").is_file():
        contents = model_folder.load(source).contents()
    elif (source / "config.json").is_file():
        contents = huggingface_import.read(source)
    else:
        raise ValueError(
            f"{source}: holds no model; accepted: a fairseq checkpoint (.pt), a model folder (with "
            "model.json), a Hugging Face folder (with config.json)"
        )
    if vocabulary is None:
        return contents
    if contents.vocabulary is not None:
        raise ValueError(f"--tokenizer {tokenizer}: {source} has a vocabulary of its own")
    return dataclasses.replace(contents, vocabulary=vocabulary)


def _no_vocabulary(source: Path) -> str:
    return (
        f"{source} has no vocabulary that can be taken along, so the model is written without one "
        "and takes ids, not text (--tokenizer names a vocabulary)"
    )
