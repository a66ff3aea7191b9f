"""The command line of pretraining: `python -m pretrain COMMAND`.

Each room declares its commands in a light `command.py`, which imports what a command needs only
when it runs.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence

from data_prep import console
from data_prep.arguments import Parser
from pretrain.bench import command as bench
from pretrain.config import command as config
from pretrain.config.settings import parse_arguments
from pretrain.convert import command as convert
from pretrain.exit_codes import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE
from pretrain.inference import command as inference
from pretrain.run import command as run
from pretrain.spikes.replay import command as replay
from pretrain.supervision import command as supervision

AddArguments = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int | None]
"""Runs a command and returns its exit code, None for success. Its docstring is the command's help.
It raises ValueError or OSError for what the user can put right."""

COMMANDS: dict[str, tuple[AddArguments, Run]] = {
    "recipes": (config.add_recipes_arguments, config.recipes),
    "plan": (bench.add_plan_arguments, bench.plan),
    "supervise": (supervision.add_arguments, supervision.supervise),
    "status": (run.add_run, run.status),
    "audit": (run.add_run, run.audit),
    "report": (run.add_run, run.report),
    "replay": (replay.add_arguments, replay.replay),
    "export": (inference.add_export_arguments, inference.export),
    "convert": (convert.add_arguments, convert.convert),
    "evaluate": (inference.add_evaluate_arguments, inference.evaluate),
    "fill-mask": (inference.add_fill_mask_arguments, inference.fill_mask),
    "bench": (bench.add_bench_arguments, bench.bench),
}
"""Every command, in the order of `--help`."""


@console.lasting()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = parse_arguments(_parser(), arguments)
    try:
        code: int = options.run_command(options) or EXIT_DONE
        if code == EXIT_DONE:
            sys.stdout.flush()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"pretrain {options.command}: error: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write(f"pretrain {options.command}: interrupted\n")
        return EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m pretrain",
        description="Pretrain language models.",
        epilog="example: python -m pretrain supervise demo",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run_command) in COMMANDS.items():
        text = inspect.getdoc(run_command) or name
        command = commands.add_parser(
            name,
            help=text.splitlines()[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(command)
        command.set_defaults(run_command=run_command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
