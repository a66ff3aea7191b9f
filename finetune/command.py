"""The commands of fine-tuning and of fine-tuned models.

Each command's arguments stand above its action. Heavy imports are inside the actions.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common.arguments import Command, CommandFailed, at_least, numbers
from pretrain.config.settings import add_device

if TYPE_CHECKING:
    from finetune.tasks import Task


def _glue_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", type=Path, help="a model folder")
    data = "a folder that has a folder of files or a saved dataset for each task, or: hub"
    add("--data", required=True, help=data)
    tasks = "such as CoLA,RTE, in any case (default: all)"
    add("--tasks", type=lambda names: names.split(","), default=["all"], help=tasks)
    protocol = "settings, seeds and scores of a published table; the default is EIFY/fairseq's "
    protocol += "settings with clipped gradients and batches of similar lengths"
    known = ("default", "published", "roberta")
    add("--protocol", choices=known, default="default", help=protocol)
    _run_arguments(command, "1; 5 with --protocol roberta")


def _finetune_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", type=Path, help="a model folder")
    train = "training examples: .csv, .tsv, .jsonl, .parquet, a folder that datasets saved, or "
    train += "datasets:NAME:SPLIT from the hub"
    add("--train", required=True, metavar="FILE", help=train)
    add("--dev", default="", metavar="FILE", help="examples to score (default: a share of train)")
    add("--test", default="", metavar="FILE", help="further examples, which are only scored")
    columns = 'column of the text; two for pairs (default: "text")'
    add("--text", nargs="+", action="extend", default=[], metavar="COLUMN", help=columns)
    add("--label", default="label", metavar="COLUMN", help='column of the label (default: "label")')
    kind = "whether labels are classes or numbers (default: inferred)"
    add("--kind", choices=("classification", "regression"), help=kind)
    share = "share of the training examples to score where --dev is not given (default: 0.1)"
    add("--dev-share", type=float, default=0.1, metavar="SHARE", help=share)
    add("--name", default="own", help="name of the task in folders and reports (default: own)")
    _run_arguments(command, "1")


def _run_arguments(command: argparse.ArgumentParser, default_seeds: str) -> None:
    """Add the arguments that control runs."""
    add = command.add_argument
    seeds = f"such as 1-3 or 1,2,7 (default: {default_seeds})"
    add("--seeds", type=numbers, default=[], help=seeds)
    output = "the folder for the runs' folders; finished runs in it are not repeated"
    add("--output", type=Path, required=True, help=output)
    weights = "start from the model's weights, from random weights of the same architecture, or "
    weights += "run once from each (default: pretrained)"
    kinds = ("pretrained", "random", "both")
    add("--weights", choices=kinds, default="pretrained", help=weights)
    jobs = "runs at once (default: what the GPUs' memory and two cores for each allow, or one per "
    jobs += "core without GPUs)"
    add("--jobs", type=at_least(0), default=0, metavar="N", help=jobs)
    size = "processes, and GPUs, per run (default: 1)"
    add("--world-size", type=at_least(1), default=1, metavar="N", help=size)
    add("--no-models", action="store_true", help="do not keep the best model of each run")
    add_device(command)
    overrides = "settings to change, such as learning_rate=2e-5 or pooling=mean"
    add("overrides", nargs="*", default=[], metavar="key=value", help=overrides)


def _glue(options: argparse.Namespace) -> None:
    """Fine-tune a model on tasks of GLUE with several seeds, and report the scores.

    example: zeroclap glue models/zero-clap --data GLUE --seeds 1,2,3 --output scores
    """
    from finetune.runs import check_output
    from finetune.tasks import find

    check_output(options.output)
    _run(options, lambda: options.data, find(options.tasks), options.protocol)


def _finetune(options: argparse.Namespace) -> None:
    """Fine-tune a model on a task of your own with several seeds, and report the scores.

    example: zeroclap finetune models/clap --train a.csv --label mood --output scores
    """
    from finetune.custom_task import Request, describe, write
    from finetune.runs import DATA, check_output

    check_output(options.output)
    texts, label = tuple(options.text or ["text"]), options.label
    sources = options.train, options.dev, options.test
    own = describe(Request(options.name, *sources, texts, label, options.kind, options.dev_share))
    print("\n".join(own.summary), flush=True)
    _run(options, lambda: str(write(options.output / DATA, own)), [own.task])


def _run(
    options: argparse.Namespace,
    data: Callable[[], str],
    tasks: Sequence["Task"],
    protocol: str = "default",
) -> None:
    """Execute the unfinished runs of tasks, and report; raise CommandFailed if one failed."""
    from finetune.batches import about_length
    from finetune.report import write_report
    from finetune.result import RESULT
    from finetune.runs import MODEL, WEIGHTS, plan_runs, prepare
    from finetune.starting import run_all
    from pretrain.processes import gpus

    gpus.select(options.device)
    gpus.gpus_of(options.world_size, "--world-size")
    plans, loaded = plan_runs(
        options.model,
        data,
        tasks,
        WEIGHTS if options.weights == "both" else (options.weights,),
        options.seeds,
        options.overrides,
        protocol=protocol,
        save_models=not options.no_models,
        world_size=options.world_size,
    )
    for limit in sorted({plan.config.max_tokens for plan in plans}):
        print(about_length(limit, loaded.data.sequence_length, loaded.model.config), flush=True)
    waiting = prepare(options.output, plans)
    counts = f"runs to do: {len(waiting)}, finished before: {len(plans) - len(waiting)}"
    print(f"{options.output}: {counts}", flush=True)
    failed = run_all(
        options.output,
        waiting,
        loaded.model.config,
        planned=len(plans),
        jobs=options.jobs,
        world_size=options.world_size,
    )
    if any(options.output.glob(f"*/{RESULT}")):
        print(f"\n{write_report(options.output)}")
        print(f"report: {options.output / 'report.md'}")
    if not failed and not options.no_models:
        print(f"next: zeroclap predict {options.output / plans[0].name / MODEL} FILE")
    if failed:
        causes = (
            f"{', '.join(name for name, why in failed.items() if why == cause)}: {cause}"
            for cause in dict.fromkeys(failed.values())
        )
        raise CommandFailed(f"runs that failed: {len(failed)}: {'; '.join(causes)}")


def _report_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="the --output of glue or finetune")


def _report(options: argparse.Namespace) -> None:
    """Print the scores of a folder's runs beside the published ones.

    example: zeroclap glue-report scores
    """
    from finetune.report import write_report

    print(write_report(options.folder))


def _predict_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", type=Path, help="a model folder with a classification head, as glue writes it")
    add("file", type=Path, help="one example per line: a text, or two separated by a tab")
    output = "new file for label (white space in it as one space), probability and text of each "
    output += "line, with tabs between (default: print them)"
    add("--output", type=Path, help=output)
    add_device(command)


def _predict(options: argparse.Namespace) -> None:
    """Label new text with a fine-tuned model.

    example: zeroclap predict scores/RTE-pretrained-seed1/model pairs.tsv
    """
    from data_prep.common.files import check_absent, write_atomically
    from finetune.predict import predict

    if options.output:
        check_absent(options.output)
    lines = predict(options.model, options.file, options.device)
    if options.output:
        write_atomically(options.output, lines.encode())
    else:
        print(lines, end="")


def _submit_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="the --output of glue")
    output = "the folder for submission.zip and the files in it"
    command.add_argument("--output", type=Path, required=True, help=output)
    add_device(command)


def _submit(options: argparse.Namespace) -> None:
    """Predict the test sets and pack them for GLUE's server, gluebenchmark.com.

    example: zeroclap submit scores --output submission
    """
    from finetune.predict import submit

    print(submit(options.folder, options.output, options.device))


COMMANDS: dict[str, Command] = {
    "finetune": (_finetune_arguments, _finetune),
    "glue": (_glue_arguments, _glue),
    "glue-report": (_report_arguments, _report),
    "predict": (_predict_arguments, _predict),
    "submit": (_submit_arguments, _submit),
}
