"""The command line of the birthplace task: `zeroclap birthplaces FUNCTION`.

Functions and options are named as in the assignment on pretraining of Stanford's course CS224N
(2023, assignment 5). training.py has each function under its name, with the help of its command.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.common.arguments import Parser, add_command
from pretrain.config.settings import add_device


def add_arguments(command: Parser) -> None:
    """Add the functions of the task, each a command of its own."""
    from finetune.birthplaces import training

    functions = command.add_subparsers(
        dest="function", required=True, metavar="FUNCTION", prog=command.prog
    )
    for name, words in FUNCTIONS.items():
        function = add_command(functions, name, getattr(training, name))
        for word in words.split():
            option = word.removesuffix("?")
            added = function.add_argument(option, **_OPTIONS[option])
            added.required |= word.endswith("_path")
        if name in ("finetune", "evaluate"):
            add_device(function)


def birthplaces(options: argparse.Namespace) -> None:
    """Teach a small model where people were born: pretraining stores knowledge.

    example: zeroclap birthplaces pretrain vanilla wiki.txt --writing_params_path before
    """


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
FUNCTIONS = {
    "pretrain": f"variant corpus --bottleneck_dim --writing_params_path --pretrain_lr {_TRAINING}",
    "finetune": "variant corpus --bottleneck_dim --reading_params_path? --writing_params_path "
    f"--finetune_corpus_path --finetune_lr {_TRAINING}",
    "evaluate": "variant corpus --bottleneck_dim --reading_params_path --eval_corpus_path "
    "--outputs_path",
    "london": "--eval_corpus_path",
    "dataset": "kind corpus --finetune_corpus_path?",
}
"""Every function's options, in the order of the work. Files are required but where "?" is."""
