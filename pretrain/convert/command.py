"""The commands `export` and `import`, which make model folders."""

import argparse
import sys
from pathlib import Path


def add_export_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    add = command.add_argument
    add("run", type=Path, help="the run's folder")
    add("--output", type=Path, required=True, help="the new model folder")
    step = "step of the checkpoint; 0: the initial weights (default: the newest one that no "
    step += "suspected spike precedes)"
    add("--step", type=int, help=step)


def export(options: argparse.Namespace) -> None:
    """Make a model folder, which transformers loads, from a run's checkpoint.

    A baseline is a plain RoBERTa, and an ALBERT whose layers share everything or nothing a plain
    ALBERT. Others carry their code (trust_remote_code).

    example: zeroclap export runs/base --output models/base
    """
    from pretrain.convert.export import export_checkpoint

    step, notes = export_checkpoint(options.run, options.output, options.step)
    what = f"the model of {options.run} after {step} steps"
    sys.stdout.write("\n".join([f"{options.output}: {what}", *notes, ""]))


def add_import_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `import`."""
    add = command.add_argument
    add("source", type=Path, help="a fairseq checkpoint (.pt)")
    add("--output", type=Path, required=True, help="the new model folder")
    tokenizer = "its vocabulary, which the checkpoint does not hold: roberta-base, or a file or "
    tokenizer += "folder that `zeroclap prepare` accepts (default: none; the model then takes ids, "
    tokenizer += "not text)"
    add("--tokenizer", help=tokenizer)
    head = "the classification head to import, in place of the head over the vocabulary"
    add("--head", metavar="NAME", default="", help=head)


def import_model(options: argparse.Namespace) -> None:
    """Make a model folder from a fairseq checkpoint. Folders of transformers need no import.

    example: zeroclap import model.pt --tokenizer roberta-base --output models/a
    """
    from data_prep import tokenizer as tokenizers
    from pretrain.convert import fairseq
    from pretrain.convert.writing import save_model

    source: Path = options.source
    if not source.is_file():
        what = "is a folder" if source.is_dir() else "no such file"
        raise ValueError(
            f"{source}: {what}; accepted: a fairseq checkpoint (.pt). Every command reads folders "
            "of transformers, and models of the hub by their names, as they are"
        )
    vocabulary = tokenizers.load(options.tokenizer) if options.tokenizer else None
    contents = fairseq.read_checkpoint(source, vocabulary, options.head)
    call = save_model(options.output, contents)
    lines = [f"{options.output}: the model of {source}", *contents.notes, call]
    if vocabulary is None:
        lines.insert(1, "it has no vocabulary, so it reads ids, not text (--tokenizer names one)")
    sys.stdout.write("\n".join([*lines, ""]))


COMMANDS = {
    "export": (add_export_arguments, export),
    "import": (add_import_arguments, import_model),
}
