"""The command line of the birthplace task: `python -m finetune birthplaces FUNCTION`.

Options are named as in the assignment on pretraining of Stanford's course CS224N (2023, assignment
5), whose commands these are. Heavy imports are inside the actions.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from pathlib import Path

from finetune.birthplaces import data_commands
from finetune.birthplaces.models import BOTTLENECK, MOST_LATENTS, POSITIONS, VARIANTS, Choice
from finetune.birthplaces.pretraining import EPOCHS, FINETUNE_RATE, PRETRAIN_RATE
from pretrain.config.settings import add_device


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the functions of the task, each a command of its own."""
    functions = command.add_subparsers(
        dest="function", required=True, metavar="FUNCTION", prog=command.prog
    )
    for name, (add, run) in FUNCTIONS.items():
        text = re.sub(r"python -m finetune birthplaces", command.prog, inspect.getdoc(run) or "")
        function = functions.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add(function)
        function.set_defaults(run_command=run, parser=function)


def birthplaces(options: argparse.Namespace) -> None:
    """Teach a small model where people were born: pretraining stores knowledge.

    example: python -m finetune birthplaces demo --output birthplaces-demo
    """
    raise AssertionError("a function is required")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("variant", choices=VARIANTS, help="the model")
    data_commands.add_corpus(command)
    command.add_argument(
        "--bottleneck_dim",
        type=int,
        metavar="N",
        help=f"latents of a Perceiver, at most {MOST_LATENTS} (default: the read model's, or "
        f"{BOTTLENECK})",
    )
    command.add_argument(
        "--position",
        choices=POSITIONS,
        help="position method (default: the read model's, or learned)",
    )


def _add_training(command: argparse.ArgumentParser, epochs: str, settings: str) -> None:
    add = command.add_argument
    add("--writing_params_path", type=Path, required=True, help="the model folder to write")
    add("--epochs", type=int, metavar="N", help=f"epochs (default: {epochs})")
    add("--seed", type=int, default=1, help="random seed (default: %(default)s)")
    prefix = "prefix of the folder's name in expt/ (default: run)"
    add("--tb_expt_name", default="run", help=prefix)
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help=f"settings of the recipe to change: {settings}",
    )


def _choice(options: argparse.Namespace) -> Choice:
    return Choice(options.variant, options.bottleneck_dim, options.position)


def _pretrain_arguments(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    settings = "all that no option sets, such as batch.global_batch_size=64"
    _add_training(command, str(EPOCHS), settings)
    rate = "peak of the learning rate, which falls to a tenth (default: 6e-3)"
    command.add_argument("--pretrain_lr", type=float, default=PRETRAIN_RATE, help=rate)


def _pretrain(options: argparse.Namespace) -> int:
    """Pretrain a model on a text by span corruption.

    The run is supervised: called again, the same command continues it.

    example: python -m finetune birthplaces pretrain vanilla wiki.txt --writing_params_path before
    """
    from finetune.birthplaces.pretraining import pretrain

    return pretrain(
        _choice(options),
        options.corpus,
        options.writing_params_path,
        learning_rate=options.pretrain_lr,
        epochs=EPOCHS if options.epochs is None else options.epochs,
        seed=options.seed,
        name=options.tb_expt_name,
        overrides=options.overrides,
    )


def _finetune_arguments(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    add = command.add_argument
    reading = "model folder of the pretrained model (default: fresh weights)"
    add("--reading_params_path", type=Path, help=reading)
    add("--finetune_corpus_path", type=Path, required=True, help="TSV file: question<TAB>answer")
    add("--finetune_lr", type=float, default=FINETUNE_RATE, help="learning rate (default: 6e-4)")
    settings = (
        "optimizer.*, training.deepspeed and, for fresh weights, model.size, model.overrides.*"
    )
    _add_training(command, "10 from pretrained weights, 75 from fresh ones", settings)


def _finetune(options: argparse.Namespace) -> None:
    r"""Train a model to answer questions.

    It runs in one process, on a GPU where there is one: CUDA_VISIBLE_DEVICES=1 chooses the second,
    DS_ACCELERATOR=cpu the CPU. Interrupted, it starts again.

    example: python -m finetune birthplaces finetune vanilla wiki.txt \
        --reading_params_path before --finetune_corpus_path train.tsv --writing_params_path after
    """
    from finetune.birthplaces.finetuning import finetune

    finetune(
        _choice(options),
        options.corpus,
        options.reading_params_path,
        options.writing_params_path,
        options.finetune_corpus_path,
        learning_rate=options.finetune_lr,
        epochs=options.epochs,
        seed=options.seed,
        name=options.tb_expt_name,
        overrides=options.overrides,
    )


def _evaluate_arguments(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    add = command.add_argument
    add("--reading_params_path", type=Path, required=True, help="model folder that finetune wrote")
    add("--eval_corpus_path", type=Path, required=True, help="TSV file, with or without answers")
    add("--outputs_path", type=Path, required=True, help="file for the predictions, one a line")
    add_device(command)


def _evaluate(options: argparse.Namespace) -> None:
    r"""Answer questions, and count the right answers.

    example: python -m finetune birthplaces evaluate vanilla wiki.txt \
        --reading_params_path after --eval_corpus_path dev.tsv --outputs_path dev.predictions
    """
    from finetune.birthplaces.answering import evaluate

    print(
        evaluate(
            _choice(options),
            options.corpus,
            options.reading_params_path,
            options.eval_corpus_path,
            options.outputs_path,
            options.device,
        )
    )


FUNCTIONS: dict[
    str,
    tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int | None]],
] = {
    "pretrain": (_pretrain_arguments, _pretrain),
    "finetune": (_finetune_arguments, _finetune),
    "evaluate": (_evaluate_arguments, _evaluate),
    "london": (data_commands.add_london_arguments, data_commands.london),
    "dataset": (data_commands.add_dataset_arguments, data_commands.dataset),
    "demo": (data_commands.add_demo_arguments, data_commands.demo),
}
"""Every function, in the order of the work."""
