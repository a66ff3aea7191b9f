"""Convert a model from one format to another, through `ModelContents`.

zeroclap      a model folder, which `export` writes and every other command reads
huggingface   a folder that transformers loads

Checkpoints (.pt) of fairseq or EIFY/fairseq can be read, but not written.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from data_prep import tokenizer as tokenizers
from pretrain.convert import fairseq, huggingface_export, huggingface_import
from pretrain.inference import model_folder
from pretrain.inference.model_folder import ModelContents


def convert(
    source: Path,
    form: str,
    output: Path,
    tokenizer: str | None = None,
    head: str | None = None,
    scores: Path | None = None,
) -> list[str]:
    """Write a model in another form.

    Args:
        source: a model folder, a fairseq checkpoint, or a Hugging Face folder.
        form: "zeroclap" or "huggingface".
        output: the folder to make; it must not exist.
        tokenizer: the vocabulary of a source that has none, as `data_prep.tokenizer.load` takes it.
        head: for Hugging Face, the classification head to export instead of a language model.
        scores: for Hugging Face, a Markdown file of scores that the model card shows.

    Returns:
        Notes for the user, one line each.

    Raises:
        ValueError: the conversion is not possible; the file is named and nothing was written.
    """
    for option, given in (("--head", head), ("--scores", scores)):
        if given and form != "huggingface":
            raise ValueError(f"{option}: only --to huggingface takes it; leave it out")
    try:
        text = scores.read_text(encoding="utf-8") if scores else ""
    except (OSError, ValueError) as error:
        raise ValueError(f"--scores {scores}: cannot be read: {error}") from None
    contents = read_model(source, tokenizer)
    notes = list(contents.provenance.get("notes", []))
    if contents.vocabulary is None:
        notes.append(
            f"{source} has no vocabulary that can be used, so the model is written without one and "
            "reads ids, not text (--tokenizer names a vocabulary)"
        )
    if form == "huggingface":
        notes += huggingface_export.write_folder(output, contents, head, text)
    else:
        model_folder.save_model(output, contents)
    return notes


def read_model(source: Path, tokenizer: str | None = None) -> ModelContents:
    """Read the model of a file or folder in any form.

    Raises:
        ValueError: there is no model, it is damaged, or a vocabulary is given though it has one.
    """
    vocabulary = tokenizers.load(tokenizer) if tokenizer else None
    if source.is_file():
        return fairseq.read_checkpoint(source, vocabulary)
    if (source / "model.json").is_file():
        contents = model_folder.load_model(source).contents()
    elif (source / "config.json").is_file():
        contents = huggingface_import.read_folder(source)
    else:
        raise ValueError(
            f"{source}: holds no model; accepted: a fairseq checkpoint (.pt), a model folder (with "
            "model.json), a Hugging Face folder (with config.json)"
        )
    if vocabulary is None:
        return contents
    if contents.vocabulary is not None:
        raise ValueError(f"--tokenizer {tokenizer}: {source} has its own vocabulary")
    return dataclasses.replace(contents, vocabulary=vocabulary)
