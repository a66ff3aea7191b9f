"""The commands of data preparation."""

import argparse
from importlib import import_module

from data_prep.common.arguments import Command


def _command(name: str, summary: str, example: str) -> Command:
    """Return a command whose module of this package is imported when the command is used."""
    module = f"data_prep.{name.replace('-', '_')}"

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        import_module(module).add_arguments(parser)

    def run(options: argparse.Namespace) -> int | None:
        return import_module(module).run(options)

    run.__doc__ = f"{summary}.\n\nexample: zeroclap {name} {example}"
    return add_arguments, run


_TEXTS = {
    "sample": (
        "Write the embedded corpus, made from the files of this Python installation",
        "--output text",
    ),
    "train-tokenizer": (
        "Train a vocabulary: byte-level BPE, unigram, or characters",
        "--input 'text/*.jsonl.zst' --vocab-size 50265 --output vocabulary",
    ),
    "prepare": (
        "Convert raw text to indexed binaries; continues an interrupted run",
        "--input 'text/*.jsonl.zst' --tokenizer vocabulary --output corpus",
    ),
    "inspect": ("Show counts, rejects, lengths and sample documents of a corpus", "corpus"),
    "verify": ("Check all checksums, indices and ids of a corpus", "corpus --workers 4"),
}
COMMANDS = {name: _command(name, *texts) for name, texts in _TEXTS.items()}
"""Every command, in the order of `--help`."""
