"""The command line of the birthplace task: `python -m finetune birthplaces FUNCTION`.

Functions and options are named as in the assignment on pretraining of Stanford's course CS224N
(2023, assignment 5). Heavy imports are inside the functions.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the functions of the task, each a command of its own."""
    functions = command.add_subparsers(
        dest="function", required=True, metavar="FUNCTION", prog=command.prog
    )
    for name, (run, words) in FUNCTIONS.items():
        text = re.sub(r"python -m finetune birthplaces", command.prog, inspect.getdoc(run) or "")
        function = functions.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for word in words.split():
            option = word.removesuffix("?")
            added = function.add_argument(option, **_OPTIONS[option])
            added.required |= word.endswith("_path")
        function.set_defaults(run_command=run, parser=function)


def birthplaces(options: argparse.Namespace) -> None:
    """Teach a small model where people were born: pretraining stores knowledge.

    example: python -m finetune birthplaces pretrain vanilla wiki.txt --writing_params_path before
    """
    raise AssertionError("a function is required")


def _pretrain(options: argparse.Namespace) -> int:
    """Pretrain a model on a text by span corruption.

    The run is supervised: called again, the same command continues it.

    example: python -m finetune birthplaces pretrain vanilla wiki.txt --writing_params_path before
    """
    from finetune.birthplaces.training import pretrain

    return pretrain(options)


def _finetune(options: argparse.Namespace) -> None:
    r"""Train a model to answer questions.

    It runs in one process, on a GPU where there is one. Interrupted, it starts again.

    example: python -m finetune birthplaces finetune vanilla wiki.txt \
        --reading_params_path before --finetune_corpus_path train.tsv --writing_params_path after
    """
    from finetune.birthplaces.training import finetune

    finetune(options)


def _evaluate(options: argparse.Namespace) -> None:
    r"""Answer questions, and count the right answers.

    example: python -m finetune birthplaces evaluate vanilla wiki.txt \
        --reading_params_path after --eval_corpus_path dev.tsv --outputs_path dev.predictions
    """
    from finetune.birthplaces.training import evaluate

    evaluate(options)


def _london(options: argparse.Namespace) -> None:
    """Count the questions that the answer "London" is right for.

    example: python -m finetune birthplaces london --eval_corpus_path dev.tsv
    """
    from finetune.birthplaces.rows import read_rows, score

    rows = read_rows(options.eval_corpus_path)
    print(score(rows, ["London"] * len(rows)))


def _dataset(options: argparse.Namespace) -> None:
    """Show what the model reads (x) and predicts (y), with <pad> as U+25A1, <mask> as U+2047.

    example: python -m finetune birthplaces dataset charcorruption wiki.txt
    """
    from finetune.birthplaces.rows import show

    show(options.kind, options.corpus, options.finetune_corpus_path)


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "variant": {"choices": ("vanilla", "perceiver"), "help": "the model"},
    "kind": {"choices": ("namedata", "charcorruption"), "help": "fine-tuning or pretraining"},
    "corpus": {"type": Path, "help": "text, a document a line; its characters are the vocabulary"},
    "--bottleneck_dim": {"type": int, "default": 32, "help": "latents of perceiver (default: 32)"},
    "--reading_params_path": {"type": Path, "help": "model folder to start from"},
    "--writing_params_path": {"type": Path, "help": "model folder to write"},
    "--finetune_corpus_path": {"type": Path, "help": "TSV file: question<TAB>answer"},
    "--eval_corpus_path": {"type": Path, "help": "TSV file: question<TAB>answer, or questions"},
    "--outputs_path": {"type": Path, "help": "file for the predictions, one a line"},
    "--pretrain_lr": {"type": float, "default": 6e-3, "help": "learning rate (default: 6e-3)"},
    "--finetune_lr": {"type": float, "default": 6e-4, "help": "learning rate (default: 6e-4)"},
    "--epochs": {"type": int, "help": "epochs (default: 650; finetune: 10, from nothing 75)"},
    "--seed": {"type": int, "default": 1, "help": "random seed (default: 1)"},
    "--tb_expt_name": {"default": "run", "help": "how the folder in expt/ begins (default: run)"},
    "overrides": {
        **{"nargs": "*", "default": [], "metavar": "key=value"},
        "help": "settings of the recipe to change; in fine-tuning those of optimizer, "
        "training.deepspeed and, without a pretrained model, model",
    },
}
_TRAINING = "--epochs --seed --tb_expt_name overrides"
FUNCTIONS: Mapping[str, tuple[Callable[[argparse.Namespace], int | None], str]] = {
    "pretrain": (
        _pretrain,
        f"variant corpus --bottleneck_dim --writing_params_path --pretrain_lr {_TRAINING}",
    ),
    "finetune": (
        _finetune,
        "variant corpus --bottleneck_dim --reading_params_path? --writing_params_path "
        f"--finetune_corpus_path --finetune_lr {_TRAINING}",
    ),
    "evaluate": (
        _evaluate,
        "variant corpus --bottleneck_dim --reading_params_path --eval_corpus_path --outputs_path",
    ),
    "london": (_london, "--eval_corpus_path"),
    "dataset": (_dataset, "kind corpus --finetune_corpus_path?"),
}
"""Every function and its options, in the order of the work. Files are required but where "?" is."""
