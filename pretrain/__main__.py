"""The command line of pretraining: `python -m pretrain COMMAND`.

Each room declares its commands in a light `command.py`, which imports what a command needs only
when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from data_prep.common.arguments import Command, Parser, program, run_command

_ROOMS = {
    "pretrain": {
        "recipes": "plan.command",
        "show": "plan.command",
        "plan": "plan.command",
        "supervise": "supervision.command",
        "status": "records.command",
        "diff": "records.command",
        "audit": "records.command",
        "replay": "spikes.command",
        "bench": "plan.command",
    },
    "use a model": {
        "export": "convert.command",
        "import": "convert.command",
        "evaluate": "inference.command",
        "fill-mask": "inference.command",
    },
}


def _command(name: str, module: str) -> Command:
    """Return a command and what adds its arguments, from the COMMANDS of a module."""
    found: Command = import_module(f"pretrain.{module}").COMMANDS[name]
    return found


GROUPS: dict[str, dict[str, Command]] = {
    title: {name: _command(name, module) for name, module in commands.items()}
    for title, commands in _ROOMS.items()
}
"""Every command, in the order of `--help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_command(_parser(), arguments)


def _parser() -> Parser:
    description = "Pretrain language models."
    return program("python -m pretrain", description, "supervise demo data.corpus=corpus", GROUPS)


if __name__ == "__main__":
    sys.exit(main())
