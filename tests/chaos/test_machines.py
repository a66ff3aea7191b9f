"""Several nodes without root: two network namespaces with an agent each, and srun tasks.

tests/machines has true hosts, sshd and Slurm; these tests run where it cannot.
"""

import os
import re
import shutil
import signal
import subprocess

import pytest

from pretrain.exit_codes import EXIT_PREEMPTED
from pretrain.supervision import control, jobs, processes
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


SRUN = """#!/bin/bash
# srun --kill-on-bad-exit=1 --ntasks-per-node 2 COMMAND: two tasks on this machine.
shift 3
export SLURM_JOB_ID=$RANDOM SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2
export SLURM_STEP_NODELIST=localhost
trap 'kill -TERM $first $second' TERM
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
code=0
for task in $first $second; do
    wait $task; status=$?
    while kill -0 $task 2>/dev/null; do wait $task; status=$?; done  # a signal had come
    [ $status -gt $code ] && code=$status
done
exit $code
"""


def test_tasks_under_srun_save_and_exit_when_slurm_terminates_them(chaos, tmp_path, undisturbed):
    """A small program replaces srun and forwards the signal, as srun does."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    chaos.schedule({1: [("pause", 0, 6)]})
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    supervisor = chaos.start("supervision.launcher=srun", **variables)
    chaos.wait_for_pause()
    control_file = control.read(chaos.run)
    srun = jobs.find(chaos.run, control_file)
    os.kill(srun.process.pid, signal.SIGTERM)
    chaos.wait_for(lambda: control.stop_requested(chaos.run, control_file.token))
    chaos.go_on()
    assert supervisor.wait(PATIENCE) == EXIT_PREEMPTED, chaos.output()
    assert [(r["step"], r["saved"]) for r in chaos.records("preempted")] == [(7, True)]
    assert chaos.supervise("supervision.launcher=srun", **variables) == 0, chaos.output()
    assert chaos.start_steps() == [0, 7]
    chaos.assert_same_as(undisturbed)
