"""The command `convert`: import and export of models."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data_prep.common.arguments import as_invoked


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `convert`."""
    add = command.add_argument
    source = "a fairseq checkpoint (.pt), a model folder or a Hugging Face folder"
    add("source", type=Path, help=source)
    add("--to", required=True, choices=("zeroclap", "huggingface"), help="the form to write")
    add("--output", type=Path, required=True, help="the folder to write")
    add(
        "--tokenizer",
        help="the vocabulary, where the source has none: roberta-base, or a file or folder that "
        f"`{as_invoked('data_prep prepare')}` accepts",
    )
    head = "with --to huggingface: export this classification head instead of the language model's"
    add("--head", metavar="NAME", help=head)
    scores = "with --to huggingface: a Markdown file that becomes a part of the model card, such "
    scores += "as the report.md that `glue-report` writes"
    add("--scores", type=Path, metavar="FILE", help=scores)


def convert(options: argparse.Namespace) -> None:
    """Convert a model from fairseq, or between Hugging Face and this project's model folders.

    In transformers a baseline is a plain RoBERTa, and an ALBERT whose layers share everything or
    nothing a plain ALBERT. Others carry their code (trust_remote_code).

    example: python -m pretrain convert model.pt --to zeroclap --output models/a
    """
    from pretrain.convert import conversion

    notes = conversion.convert(
        options.source,
        options.to,
        options.output,
        options.tokenizer,
        options.head,
        options.scores,
    )
    for note in notes:
        sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(f"{options.output}: {options.source} as {options.to}\n")


COMMANDS = {"convert": (add_arguments, convert)}
