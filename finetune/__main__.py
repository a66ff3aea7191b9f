"""The command line of fine-tuning: `python -m finetune COMMAND`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data_prep.common.arguments import Command, Parser, program, run_command
from finetune import command, demo
from finetune.birthplaces import command as birthplaces
from finetune.studies import command as studies

COMMANDS: dict[str, Command] = {
    **command.COMMANDS,
    "birthplaces": (birthplaces.add_arguments, birthplaces.birthplaces),
    **studies.COMMANDS,
    "demo": (demo.add_arguments, demo.demo),
}
"""Every command, in the order of `--help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_command(_parser(), arguments)


def _parser() -> Parser:
    description = (
        "Fine-tune a model folder on your own task, GLUE or birthplaces, and use the result."
    )
    return program("python -m finetune", description, "demo", {"fine-tune": COMMANDS})


if __name__ == "__main__":
    sys.exit(main())
