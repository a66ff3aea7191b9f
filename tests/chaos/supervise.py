"""`python -m tests.chaos.supervise RECIPE ...`: the supervisor, with faults planned for its ranks.

CHAOS_PLAN names the plan (fault.py). CHAOS_CLOCK=1 makes the clock of the supervisor jump. Agents
that it starts over ssh are those of agent.py.
"""

import os
import sys

from finetune import zeroclap as command_line
from pretrain.supervision import agent, hosts
from tests.chaos.fault import launch_with_faults, let_the_clock_jump

AGENT = "tests.chaos.agent"
real = hosts.remote


def remote(name, words):
    return real(name, [AGENT if word == agent.MODULE else word for word in words])


if __name__ == "__main__":
    launch_with_faults()
    hosts.remote = remote
    if os.environ.get("CHAOS_CLOCK"):
        let_the_clock_jump()
    sys.exit(command_line.main(["supervise", *sys.argv[1:]]))
