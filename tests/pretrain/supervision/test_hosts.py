"""Hostfiles, and what the other machines get; tests/machines has a true ssh."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from pretrain.config.run import RunConfig
from pretrain.config.sections import SupervisionConfig
from pretrain.supervision import hosts
from pretrain.supervision.nodes import Node, OtherNodes


@pytest.fixture
def hostfile(tmp_path):
    def write(text):
        if text is not None:
            (tmp_path / "hosts").write_text(text)
        return str(tmp_path / "hosts")

    return write


def test_a_hostfile_names_machines_and_their_slots(hostfile):
    text = "gpu-1 slots=8\n# the second\n\n  gpu-3\tslots=8  # the last\n"
    for start in ("", "\ufeff"):  # as some editors begin a file
        assert hosts.read_hostfile(hostfile(start + text)) == (["gpu-1", "gpu-3"], 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"hosts names no machine; .*gpu-1 slots=8"),
        (None, r"hosts: no such file"),
        ("gpu-1 slots=8\ngpu-2\n", "'gpu-2' is not of the form"),
        ("gpu-1 slots=0\n", "'gpu-1 slots=0' is not of the form"),
        ("gpu-1 slots=8\ngpu-1 slots=8\n", "names gpu-1 twice"),
        ("gpu-1 slots=8\ngpu-2 slots=8\ngpu-3 slots=4\n", "gpu-3 has 4 slots and gpu-1 has 8"),
    ],
)
def test_other_hostfiles_are_refused_by_name(hostfile, text, message):
    with pytest.raises(ValueError, match=message):
        hosts.read_hostfile(hostfile(text))


def test_the_slots_are_the_ranks_of_each_node(hostfile):
    config = RunConfig(supervision=SupervisionConfig(hostfile=hostfile("a slots=3\nb slots=3\n")))
    resolved, names = hosts.resolve(config, Node())
    assert (resolved.supervision.processes_per_node, names) == (3, ["a", "b"])
    assert hosts.resolve(RunConfig(), Node(1, 2)) == (RunConfig(), [])
    with pytest.raises(ValueError, match="--nodes 2 with supervision.hostfile"):
        hosts.resolve(config, Node(1, 2))


def test_other_machines_get_only_variables_of_the_ranks_and_the_user_s_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("\ufeffMINE=a b=c\nNCCL_DEBUG=WARN\n\n")
    environ = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "p", "SECRET": "s", "DEEPSPEED_TIMEOUT": "9"}
    found = {"NCCL_DEBUG": "WARN", "PYTHONPATH": "p", "DEEPSPEED_TIMEOUT": "9", "MINE": "a b=c"}
    assert hosts.exported(environ) == found
    (tmp_path / "latin").write_bytes(b"# f\xfcr\n")
    with pytest.raises(ValueError, match=r"latin: is not UTF-8"):
        hosts.exported({"DS_ENV_FILE": "latin"})
    (tmp_path / "module.py").write_text("import os, sys; print(os.environ['MINE'], *sys.argv)")
    *_, name, command = hosts.remote("gpu-2", ["module", "a b"])
    assert name == "gpu-2"
    assert "MINE" not in command  # every user of a machine can read it
    given = hosts.variables({**environ, "PYTHONPATH": str(tmp_path)})
    done = subprocess.run(["/bin/sh", "-c", command], input=given, capture_output=True)
    assert done.stdout.decode() == f"a b=c {tmp_path}/module.py a b\n"


def test_only_what_the_newest_ssh_printed_is_quoted(tmp_path, monkeypatch):
    """The log has the lines of all, also of earlier starts."""
    (tmp_path / "logs").mkdir()
    log, said = tmp_path / "logs" / "agent-001.log", []
    log.write_text("ValueError: node 1 has an agent already\n")
    ssh = tmp_path / "ssh"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(hosts, "RETRY_SECONDS", 0.0)
    agents = hosts.Agents(["gpu-1", "gpu-2"], tmp_path, said.append)
    others, replaced = OtherNodes(2, agents.start, None), []
    monkeypatch.setattr(others, "replace", replaced.append)
    assert agents.last_lines([1]) == ""  # others start it
    for script in ("exit 255", "echo hallo; echo no room; exit 1", "exit 0"):
        ssh.write_text(f"#!/bin/sh\n{script}\n")
        ssh.chmod(0o755)
        agents.keep(others)
        agents._children[1].wait(60)
    assert said == [
        "gpu-2 cannot be reached: nothing was printed; trying again",
        "the agent on gpu-2 ended with code 1: no room; trying again",
    ]
    assert replaced == [1, 1, 1]  # each may end the one before
    log.write_bytes(log.read_bytes() + b"full\n")
    assert agents.last_lines([1]) == "; gpu-2 printed last: full"


def test_an_agent_gets_the_variables_without_a_folder_for_temporary_files(tmp_path, monkeypatch):
    """And the whole path of the run: it ends other agents of the same words."""
    (tmp_path / "ssh").write_text("#!/bin/sh\necho $* > words\ncat\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # as when /tmp is full
    agents = hosts.Agents(["gpu-1", "gpu-2"], Path(), print)
    agents.keep(OtherNodes(2, agents.start, None))
    agents.close(60.0)
    assert (tmp_path / "logs" / "agent-001.log").read_bytes() == hosts.variables(os.environ)
    assert f"pretrain.supervision.agent {tmp_path} 1 {agents.start}" in Path("words").read_text()
