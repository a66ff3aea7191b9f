"""The program `zeroclap COMMAND`: the commands of all packages.

Each room declares its commands in a light `command.py`, which imports what a command needs only
when it runs.
"""

import sys
from functools import partial

from data_prep import command as data_prep
from data_prep.common.arguments import Command, Groups, run_command
from finetune import command, demo
from finetune.birthplaces import command as birthplaces
from finetune.studies import command as studies
from pretrain.convert import command as convert
from pretrain.inference import command as inference
from pretrain.plan import command as plan
from pretrain.records import command as records
from pretrain.spikes import command as spikes
from pretrain.supervision import command as supervision

_GROUPS: dict[str, dict[str, Command]] = {
    "prepare data": data_prep.COMMANDS,
    "pretrain": {**plan.COMMANDS, **supervision.COMMANDS, **records.COMMANDS, **spikes.COMMANDS},
    "use a model": {**convert.COMMANDS, **inference.COMMANDS},
    "fine-tune": {
        **command.COMMANDS,
        "birthplaces": (birthplaces.add_arguments, birthplaces.birthplaces),
        "study": (studies.add_arguments, studies.study),
        "demo": (demo.add_arguments, demo.demo),
    },
}
_SPECIALISTS = ("replay", "bench", "submit", "birthplaces")
"""Commands that a first run, and a first use of its model, do without."""
GROUPS: Groups = {
    title: {name: each for name, each in commands.items() if name not in _SPECIALISTS}
    for title, commands in _GROUPS.items()
} | {"for specialists": {n: c[n] for c in _GROUPS.values() for n in c if n in _SPECIALISTS}}
"""Every command, in the order of the work, and at the end those for specialists."""

main = partial(run_command, GROUPS)


if __name__ == "__main__":
    sys.exit(main())
