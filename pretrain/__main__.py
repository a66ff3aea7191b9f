"""The command line of pretraining: `python -m pretrain COMMAND`.

Each room declares its commands in a light `command.py`, which imports what a command needs only
when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data_prep import console
from data_prep.arguments import Command, Parser, program, run_command
from pretrain.bench import command as bench
from pretrain.config import command as config
from pretrain.config.settings import add_recipe
from pretrain.convert import command as convert
from pretrain.inference import command as inference
from pretrain.inference import evaluate_command
from pretrain.machine import command as machine
from pretrain.run import command as run
from pretrain.spikes.replay import command as replay
from pretrain.supervision import command as supervision

GROUPS: dict[str, dict[str, Command]] = {
    "pretrain": {
        "recipes": (config.add_recipes_arguments, config.recipes),
        "show": (add_recipe, config.show),
        "plan": (bench.add_plan_arguments, bench.plan),
        "preflight": (machine.add_arguments, machine.preflight),
        "supervise": (supervision.add_arguments, supervision.supervise),
        "status": (run.add_status_arguments, run.status),
        "profile": (supervision.add_profile_arguments, supervision.profile),
        "audit": (run.add_audit_arguments, run.audit),
        "report": (run.add_run, run.report),
        "replay": (replay.add_arguments, replay.replay),
        "bench": (bench.add_bench_arguments, bench.bench),
    },
    "use a model": {
        "export": (inference.add_export_arguments, inference.export),
        "evaluate": (evaluate_command.add_evaluate_arguments, evaluate_command.evaluate),
        "fill-mask": (inference.add_fill_mask_arguments, inference.fill_mask),
        "generate": (inference.add_generate_arguments, inference.generate),
        "convert": (convert.add_arguments, convert.convert),
        "push": (convert.add_push_arguments, convert.push),
    },
}
"""Every command, in the order of `--help`."""


@console.lasting()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_command(_parser(), arguments)


def _parser() -> Parser:
    description = "Pretrain language models."
    return program("python -m pretrain", description, "supervise demo data.corpus=corpus", GROUPS)


if __name__ == "__main__":
    sys.exit(main())
