"""The command line of pretraining: `python -m pretrain COMMAND`.

Each room declares its commands in a light `command.py`, which imports what a command needs only
when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data_prep import console
from data_prep.arguments import AddArguments, Parser, Run, add_commands, run_command
from pretrain.bench import command as bench
from pretrain.config import command as config
from pretrain.config.settings import parse_arguments
from pretrain.convert import command as convert
from pretrain.inference import command as inference
from pretrain.run import command as run
from pretrain.spikes.replay import command as replay
from pretrain.supervision import command as supervision

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
    return run_command("pretrain", parse_arguments(_parser(), arguments))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m pretrain",
        description="Pretrain language models.",
        epilog="example: python -m pretrain supervise demo",
    )
    add_commands(parser, COMMANDS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
