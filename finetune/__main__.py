"""The command line of fine-tuning: `python -m finetune COMMAND`. Heavy imports happen inside."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep import console
from data_prep.arguments import Parser
from pretrain.config.settings import add_device, parse_arguments

EXIT_DONE = 0
EXIT_RUN_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@console.lasting()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parse_arguments(_parser(), arguments)
    try:
        code: int = options.action(options)
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"finetune {options.command}: error: {message}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write(f"finetune {options.command}: stopped\n")
        return EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m finetune", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "glue", help="fine-tune a model on tasks, several seeds side by side, and report"
    )
    command.add_argument("model", type=Path, help="a model folder")
    command.add_argument(
        "--data",
        required=True,
        help="a folder with the tasks' folders of TSV files or saved datasets in it, or hub",
    )
    command.add_argument(
        "--tasks", type=_words, default=["all"], help="names, such as CoLA,RTE (default: all)"
    )
    command.add_argument("--seeds", type=_seeds, default=[1], help="such as 1,2,3 (default: 1)")
    command.add_argument(
        "--output",
        type=Path,
        required=True,
        help="a folder for each run in it; runs that are done there are not done again",
    )
    command.add_argument(
        "--weights",
        choices=("pretrained", "random", "both"),
        default="pretrained",
        help="begin with the model's, with fresh ones of "
        "the same architecture, or once with each (default: pretrained)",
    )
    command.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="runs at once (default: one a GPU, or one a core where there is none)",
    )
    command.add_argument(
        "--world-size",
        type=int,
        default=1,
        metavar="N",
        help="processes, and GPUs, that share each run's batches (default: 1)",
    )
    command.add_argument(
        "--retries",
        type=int,
        default=2,
        metavar="N",
        help="do a pretrained run that collapsed again, with another seed and a longer warm-up, so "
        "many times (default: 2)",
    )
    command.add_argument(
        "--recipe",
        choices=("default", "seed"),
        default="default",
        help="settings to begin with: seed is the original's exactly (default: default, which "
        "also clips gradients and batches by length)",
    )
    command.add_argument(
        "--no-models",
        action="store_true",
        help="do not keep each run's best model as a model folder in the run's folder",
    )
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that differ from the task's own, such as learning_rate=2e-5 or pooling=mean",
    )
    command.set_defaults(action=_glue)

    command = commands.add_parser("report", help="the original's table beside a folder's runs")
    command.add_argument("folder", type=Path, help="the --output of glue")
    command.set_defaults(action=_report)

    command = commands.add_parser("predict", help="label new text with a fine-tuned model")
    command.add_argument("model", type=Path, help="a model folder with a head, as glue keeps them")
    command.add_argument(
        "file", type=Path, help="a line an example: a text, or two with a tab between them"
    )
    command.add_argument("--head", default="", help="its name, where the model has several")
    command.add_argument(
        "--output", type=Path, help="write label and probability here (default: print them)"
    )
    add_device(command)
    command.set_defaults(action=_predict)

    command = commands.add_parser("submit", help="predict test sets in the form of GLUE's server")
    command.add_argument("folder", type=Path, help="the --output of glue")
    command.add_argument("--output", type=Path, required=True, help="a folder for the files")
    add_device(command)
    command.set_defaults(action=_submit)

    command = commands.add_parser(
        "acceptability", help="make a task in CoLA's layout of the sentences of a text"
    )
    command.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="GLOB",
        help="files that data_prep reads, such as held-out.jsonl.zst",
    )
    command.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the folder to make CoLA/train.tsv and CoLA/dev.tsv in",
    )
    command.add_argument(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="GLOB",
        help="leave out sentences that stand in these: what the model was pretrained on",
    )
    command.add_argument(
        "--train",
        type=int,
        default=1000,
        metavar="N",
        help="sentences, each of them intact and scrambled (default: 1000)",
    )
    command.add_argument(
        "--dev", type=int, default=300, metavar="N", help="sentences, likewise (default: 300)"
    )
    command.add_argument("--seed", type=int, default=1, help="of split and scrambling (default: 1)")
    command.set_defaults(action=_acceptability)

    command = commands.add_parser("demo", help="the main job end to end, on text of Python's own")
    command.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="a folder of the demo's own, made anew (default: demo-output)",
    )
    command.set_defaults(action=_demo)
    return parser


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"{text!r}: write different names, as in CoLA,RTE")
    return words


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write different whole numbers from 0 on, as in 1,2,3"
        )
    return seeds


def _glue(options: argparse.Namespace) -> int:
    from finetune.config import WEIGHTS
    from finetune.launch import run_all
    from finetune.planning import plan_runs, prepare
    from finetune.report import write_report

    for name, least in (("jobs", 0), ("world-size", 1), ("retries", 0)):
        value = getattr(options, name.replace("-", "_"))
        if value < least:
            raise ValueError(f"--{name} {value}: accepted: {least} or more")
    weights = WEIGHTS if options.weights == "both" else (options.weights,)
    plans = plan_runs(
        options.model,
        options.data,
        options.tasks,
        weights,
        options.seeds,
        options.overrides,
        recipe=options.recipe,
        save_models=not options.no_models,
    )
    waiting = prepare(options.output, plans, options.retries)
    _say(f"{options.output}: {len(waiting)} runs to do, {len(plans) - len(waiting)} done before")
    failed = run_all(
        options.output,
        waiting,
        _say,
        jobs=options.jobs,
        world_size=options.world_size,
        retries=options.retries,
    )
    if len(failed) < len(plans):
        _say("\n" + write_report(options.output))
    if failed:
        sys.stderr.write(f"finetune glue: error: failed: {', '.join(failed)}\n")
        return EXIT_RUN_FAILED
    return EXIT_DONE


def _report(options: argparse.Namespace) -> int:
    from finetune.report import write_report

    _say(write_report(options.folder))
    return EXIT_DONE


def _predict(options: argparse.Namespace) -> int:
    from data_prep.files import write_atomically
    from finetune.predict import predict

    lines = predict(options.model, options.file, options.head, options.device)
    if options.output:
        write_atomically(options.output, lines.encode())
    else:
        sys.stdout.write(lines)
    return EXIT_DONE


def _submit(options: argparse.Namespace) -> int:
    from finetune.predict import submit

    submit(options.folder, options.output, _say, options.device)
    return EXIT_DONE


def _acceptability(options: argparse.Namespace) -> int:
    from data_prep.inputs import find_inputs
    from finetune import acceptability

    documents = acceptability.find(find_inputs(options.input), find_inputs(options.exclude))
    numbers = {"train": options.train, "dev": options.dev, "seed": options.seed}
    files = acceptability.make(documents, **numbers)
    acceptability.write(options.output, files, numbers)
    found = sum(len(document.sentences) for document in documents)
    _say(
        f"{options.output / acceptability.TASK.name}: {options.train:,} train and "
        f"{options.dev:,} dev of {found:,} sentences in {len(documents):,} documents"
    )
    return EXIT_DONE


def _demo(options: argparse.Namespace) -> int:
    from finetune.demo import run_demo

    return run_demo(options.output)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
