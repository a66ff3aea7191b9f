"""The command line of pretraining: `python -m pretrain COMMAND`.

Each room declares its commands in a light `command.py`, which imports what a command needs only
when it runs.
"""

from __future__ import annotations

import sys
from functools import partial

from data_prep.common.arguments import Command, program, run_command
from pretrain.convert import command as convert
from pretrain.inference import command as inference
from pretrain.plan import command as plan
from pretrain.records import command as records
from pretrain.spikes import command as spikes
from pretrain.supervision import command as supervision

GROUPS: dict[str, dict[str, Command]] = {
    "pretrain": {**plan.COMMANDS, **supervision.COMMANDS, **records.COMMANDS, **spikes.COMMANDS},
    "use a model": {**convert.COMMANDS, **inference.COMMANDS},
}
"""Every command, in the order of `--help`."""


_example = "supervise demo data.corpus=corpus"
_parser = partial(program, "python -m pretrain", "Pretrain language models.", _example, GROUPS)
main = partial(run_command, _parser)

if __name__ == "__main__":
    sys.exit(main())
