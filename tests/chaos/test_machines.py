"""Several nodes without root: two network namespaces with an agent each.

tests/machines has true hosts, sshd and Slurm; these tests run where it cannot.
"""

import os
import re
import shutil
import signal
import subprocess

import pytest

from pretrain.processes import processes
from tests.chaos.conftest import PATIENCE

pytestmark = pytest.mark.slow

NAMESPACES = """
set -e
ip link set lo up
ip link add first type veth peer name second
unshare -n sleep 3600 & other=$!
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link set second netns $other
ip addr add 10.77.0.1/24 dev first
ip link set first up
nsenter -t $other -n sh -ec \
    'ip link set lo up; ip addr add 10.77.0.2/24 dev second; ip link set second up'
echo $$ $other
exec sleep 3600
"""


@pytest.fixture
def nodes():
    """Prefixes of commands that run in two network namespaces that can reach each other."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs unshare, nsenter and ip")
    holder = subprocess.Popen(
        ["unshare", "-rn", "sh", "-c", NAMESPACES],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = holder.stdout.readline().split()
    try:
        if len(pids) != 2:
            holder.kill()
            pytest.skip(f"network namespaces are not allowed here: {holder.stderr.read().strip()}")
        enter = ["nsenter", "--preserve-credentials", "-U", "-n", "-t"]
        yield [[*enter, pid] for pid in pids]
    finally:
        for pid in {*map(int, pids), holder.pid}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        holder.communicate()


def start(chaos, nodes, number):
    name = ("first", "second")[number]
    overrides = ("supervision.processes_per_node=1", "supervision.node_silence_seconds=20")
    options = ("--nodes", "2", "--node-rank", str(number), "--master-addr", "10.77.0.1")
    return chaos.start(*overrides, *options, before=nodes[number], GLOO_SOCKET_IFNAME=name)


def test_the_supervisor_waits_for_a_node_that_died_and_the_run_continues(chaos, nodes, undisturbed):
    chaos.schedule({1: [("pause", 0, 6)]})
    supervisor, agent = start(chaos, nodes, 0), start(chaos, nodes, 1)
    chaos.wait_for_pause()
    agent.kill()
    agent.wait()
    for member in processes.members(chaos.run, 1):
        os.kill(member.pid, signal.SIGKILL)
    chaos.wait_for(lambda: chaos.records("crash", "hang"))
    chaos.go_on()
    agent = start(chaos, nodes, 1)
    assert supervisor.wait(PATIENCE) == 0, chaos.output()
    assert agent.wait(PATIENCE) == 0, chaos.output()
    assert chaos.start_steps() == [0, 4], chaos.output()
    assert re.search(r"node 1 .*was silent for 20 s", chaos.records("crash", "hang")[0]["reason"])
    chaos.assert_same_as(undisturbed)
