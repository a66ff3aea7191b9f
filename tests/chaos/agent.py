"""`python -m tests.chaos.agent ...`: an agent, with faults planned for its ranks (fault.py)."""

import sys

from pretrain.supervision import agent
from tests.chaos.fault import launch_with_faults

if __name__ == "__main__":
    launch_with_faults()
    agent.MODULE = "tests.chaos.agent"  # which it finds its predecessors by
    sys.exit(agent.main(sys.argv[1:]))
