"""The program `zeroclap COMMAND`: the commands of all packages."""

from __future__ import annotations

import sys
from functools import partial

import pretrain.__main__ as pretrain
from data_prep import command as data_prep
from data_prep.common.arguments import Command, program, run_command
from finetune import command, demo
from finetune.birthplaces import command as birthplaces
from finetune.studies import command as studies

_GROUPS: dict[str, dict[str, Command]] = {
    "prepare data": data_prep.COMMANDS,
    **pretrain.GROUPS,
    "fine-tune": {
        **command.COMMANDS,
        "birthplaces": (birthplaces.add_arguments, birthplaces.birthplaces),
        "study": (studies.add_arguments, studies.study),
        "demo": (demo.add_arguments, demo.demo),
    },
}
_SPECIALISTS = ("replay", "bench", "submit", "birthplaces")
"""Commands that a first run, and a first use of its model, do without."""
GROUPS = {
    title: {name: each for name, each in commands.items() if name not in _SPECIALISTS}
    for title, commands in _GROUPS.items()
} | {"for specialists": {n: c[n] for c in _GROUPS.values() for n in c if n in _SPECIALISTS}}
"""Every command, in the order of the work, and at the end those for specialists."""

_description = "Pretrain and fine-tune language models, from raw text to a GLUE table."
_parser = partial(program, "zeroclap", _description, "demo", GROUPS)
main = partial(run_command, _parser)


if __name__ == "__main__":
    sys.exit(main())
