"""`python -m tests.chaos.supervise RECIPE ...`: the supervisor, with faults planned for its ranks.

CHAOS_PLAN names the plan (fault.py). CHAOS_CLOCK=1 makes the clock of the supervisor jump.
"""

import dataclasses
import os
import sys

from pretrain import __main__ as command_line
from pretrain.supervision import launch
from tests.chaos.fault import let_the_clock_jump

real = launch.next_control_file

if __name__ == "__main__":
    launch.next_control_file = lambda *words: dataclasses.replace(
        real(*words), module="tests.chaos.fault"
    )
    if os.environ.get("CHAOS_CLOCK"):
        let_the_clock_jump()
    sys.exit(command_line.main(["supervise", *sys.argv[1:]]))
