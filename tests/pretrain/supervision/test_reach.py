"""Whether the machines of a hostfile can be reached and are alike; a script replaces ssh."""

import json
import os
import socket
import subprocess
import sys

import pytest

from pretrain.config.run import RunConfig
from pretrain.config.sections import SupervisionConfig
from pretrain.processes import gpus
from pretrain.supervision import reach
from pretrain.supervision.nodes import Node


def test_a_run_is_supervised_from_the_first_machine(tmp_path):
    own = socket.gethostname()
    for name in (own, "localhost", "127.0.0.1"):
        reach.check_first_machine([name, "other"])
    for name in ("192.0.2.1", "x..y"):
        with pytest.raises(ValueError, match=f"its first machine is {name}, and this is {own}"):
            reach.check_first_machine([name, own])
    assert reach.connect([own], RunConfig(folder=str(tmp_path))) == Node()  # asks nobody


INTERRUPTED = """
import os, signal, sys
from pretrain.config.run import RunConfig
from pretrain.supervision import reach
reach.print = lambda *_, **__: os.kill(os.getpid(), number)
names, number = ["localhost", "down"], getattr(signal, sys.argv[2])
signal.signal(number, signal.SIG_DFL)  # nohup may have made this one ignore it
try:
    reach.connect(names, RunConfig(folder=sys.argv[1] + "/a"))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_while_machines_are_waited_for_leaves_no_file(ssh, tmp_path, number):
    (tmp_path / "runs").mkdir()
    words = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "runs"), number]
    assert subprocess.run(words, timeout=60).returncode == 130
    assert not [*(tmp_path / "runs").iterdir()]


SSH = """#!/bin/sh
# Runs a command here, as ssh does elsewhere; the machine's name says how it fails.
while [ "$1" != -- ]; do shift; done
case $2 in
    down) echo "ssh: connect to host down port 22: No route to host" >&2; exit 255 ;;
    closed) echo "me@closed: Permission denied (publickey)." >&2; exit 255 ;;
    bare) echo "sh: 1: cd: can't cd to /there" >&2; exit 2 ;;
    forced) echo no shell here; exit 0 ;;
    apart) exec sh -c "$(echo "$3" | sed 's|[^ ]*/.hosts-[^ ]*|/nowhere|')" ;;
esac
export SSH_CONNECTION="10.0.0.1 5 10.0.0.2 22"
printf 'f\\374r: beginning of a line of its login'
exec sh -c "$3"
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def connect(*names):
        supervision = SupervisionConfig(processes_per_node=1, node_wait_seconds=0.0)
        config = RunConfig(folder=str(tmp_path / "runs" / "a"), supervision=supervision)
        try:
            return reach.connect(["localhost", *names], config)
        finally:
            assert [path.name for path in tmp_path.iterdir()] == ["ssh"]

    return connect


def test_machines_that_answer_as_this_one_tell_its_address(ssh):
    assert ssh("good", "better") == Node(0, 3, "10.0.0.1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("down", "down cannot be reached: ssh: connect to host down port 22: No route to host"),
        ("closed", "closed: me@closed: Permission denied"),
        ("bare", "bare: sh: 1: cd: can't cd to /there"),
        ("apart", "apart does not have the folder .*a file system that all machines share"),
        ("forced", "forced did not run the command that ssh sent; it printed 'no shell here'"),
    ],
)
def test_other_machines_are_refused_by_name(ssh, name, message):
    with pytest.raises(ValueError, match=f"supervision.hostfile: {message}"):
        ssh("good", name)


@pytest.mark.parametrize(
    ("said", "permanent"),
    [
        ("ssh: Could not resolve hostname gpu-9: Name or service not known", True),
        ("ssh: Could not resolve hostname gpu-9: Temporary failure in name resolution", False),
        ("ssh: connect to host gpu-2 port 2222: Connection refused", True),
        ("ssh: connect to host gpu-2 port 22: No route to host", False),
        ("ssh: connect to host gpu-2 port 22: Connection timed out", False),
    ],
)
def test_what_will_not_go_away_by_waiting_is_not_waited_for(said, permanent):
    assert bool(reach._PERMANENT.search(said)) == permanent


def test_other_versions_another_device_and_fewer_gpus_than_slots_are_refused(
    ssh, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(reach, "versions", lambda: {"Python": "3.99", "torch": "1"})
        with pytest.raises(ValueError, match=r"good has Python 3.*, and this machine 3\.99"):
            ssh("good")
    (tmp_path / "x").write_text("token")
    monkeypatch.setattr(gpus, "visible_gpus", lambda *_: ["0", "1"])
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    for device, slots, said in (
        ("cuda", 2, ""),
        ("cuda", 3, "cannot take part: supervision.hostfile slots: 3 ranks on a machine with 2 "),
        ("cpu", 2, "cannot take part: ranks here would use the cuda, those of node 0 the cpu"),
    ):
        found = reach._difference(tmp_path / "x", "token", json.dumps([{}, {}, device, slots]))
        assert (found[: len(said)], bool(found)) == (said, bool(said))
