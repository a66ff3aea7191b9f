"""The command line of fine-tuning: `python -m finetune COMMAND`."""

from __future__ import annotations

import sys
from functools import partial

from data_prep.common.arguments import Command, program, run_command
from finetune import command, demo
from finetune.birthplaces import command as birthplaces
from finetune.studies import command as studies

COMMANDS: dict[str, Command] = {
    **command.COMMANDS,
    "birthplaces": (birthplaces.add_arguments, birthplaces.birthplaces),
    "study": (studies.add_arguments, studies.study),
    "demo": (demo.add_arguments, demo.demo),
}
"""Every command, in the order of `--help`."""


_description = "Fine-tune a model folder on your own task, GLUE or birthplaces, and use the result."
_parser = partial(program, "python -m finetune", _description, "demo", {"fine-tune": COMMANDS})
main = partial(run_command, _parser)

if __name__ == "__main__":
    sys.exit(main())
