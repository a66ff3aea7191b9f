"""The launcher's control file, command line, environment and process."""

import base64
import json
import multiprocessing.spawn  # noqa: F401 - remembers the Python of its first import
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import joblib
import psutil
import pytest

from pretrain.config.run import RunConfig
from pretrain.config.sections import SupervisionConfig
from pretrain.processes import gpus, launching, processes
from pretrain.records import control
from pretrain.records.control import ControlFile
from pretrain.supervision import launch
from pretrain.supervision.nodes import Node
from tests.running import wait_until

RUN = Path("/runs/a")
ONE = ControlFile("aa", 3, control.RUN, nodes=1, processes_per_node=2, port=999)
TWO = ControlFile("aa", 3, control.RUN, nodes=2, processes_per_node=4, address="10.0.0.1", port=999)


def test_each_launch_has_a_higher_number_than_all_before(tmp_path):
    config = RunConfig(folder=str(tmp_path))

    def next_number(*records):
        return launch.next_control_file(config, Node(), records).attempt

    began = {"kind": "attempt", "attempt": 1, "step": 0}
    never_began = {"kind": "crash", "attempt": 2, "step": 0}
    assert [next_number(), next_number(began), next_number(began, never_began)] == [1, 2, 3]
    control.write(tmp_path, ControlFile("killed before anything was recorded", 3, control.RUN))
    assert next_number(began, never_began) == 4


def test_command_of_deepspeed_on_one_node_and_on_several():
    """The one that its program `deepspeed` would start, without that program."""
    for control_file, node, world, address in (
        (ONE, 0, {"node-0": [0, 1]}, "127.0.0.1"),
        (TWO, 1, {"node-0": [0, 1, 2, 3], "node-1": [0, 1, 2, 3]}, "10.0.0.1"),
    ):
        command = " ".join(launch.command(RUN, control_file, node))
        start, _, rest = command.partition(" --world_info=")
        encoded, _, options = rest.partition(" ")
        assert start == f"{sys.executable} -u -m deepspeed.launcher.launch"
        assert json.loads(base64.urlsafe_b64decode(encoded)) == world
        address = f"--master_addr {address} --master_port 999"
        module = "--module pretrain.train /runs/a/supervised.yaml"
        assert options == f"--node_rank {node} {address} {module}"


def test_the_launcher_gets_the_marks_and_ranks_of_several_nodes_equal_threads(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("A", "1")
    run = tmp_path / "a run"
    marks = {"ZEROCLAP_RUN": str(run), "ZEROCLAP_ATTEMPT": "aa"}
    assert launch.environment(run, ONE).items() >= {"A": "1", **marks}.items()
    config = RunConfig(folder=str(run), supervision=SupervisionConfig(processes_per_node=1))
    monkeypatch.setattr(joblib, "cpu_count", lambda: 3)  # a container's, for example
    for of_node_0, expected in ("7", "7"), (None, "3"):
        monkeypatch.delenv("OMP_NUM_THREADS")
        if of_node_0:
            monkeypatch.setenv("OMP_NUM_THREADS", of_node_0)
        several = launch.next_control_file(config, Node(0, 2), [])
        monkeypatch.setenv("OMP_NUM_THREADS", "5")  # as a login of node 1 may do
        found = launch.environment(run, several, 1)
        assert (found["OMP_NUM_THREADS"], found["ZEROCLAP_RUN"]) == (expected, f"{run}#1")
    assert launch.environment(run, ONE)["OMP_NUM_THREADS"] == "5"


def test_a_node_whose_ranks_would_use_another_device_is_refused(tmp_path, machine):
    machine(2)
    of_node_0 = launch.next_control_file(RunConfig(folder=str(tmp_path)), Node(), [])
    machine(0)
    with pytest.raises(ValueError, match="would use the cpu, those of node 0 the cuda.*nvidia-smi"):
        launch.environment(tmp_path, of_node_0, 1)


# --- the GPUs of the ranks --------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """`machine(present, visible)`: the number of GPUs, and CUDA_VISIBLE_DEVICES."""

    def make(present, visible=None):
        found = [Path(f"/dev/nvidia{number}") for number in range(present)]
        monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(found))
        for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
            monkeypatch.delenv(name, raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def devices_of_ranks(monkeypatch, command, present):
    """Return rank and CUDA_VISIBLE_DEVICES of each rank that DeepSpeed would start.

    The `main` function of DeepSpeed's launcher runs; only its processes are replaced.
    """
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.launcher import launch as deepspeed_launch

    started = []

    def start(command, env, **_):
        started.append((env["RANK"], env["CUDA_VISIBLE_DEVICES"]))
        return Mock(pid=1, returncode=0, wait=lambda: 0, poll=lambda: 0)

    accelerator = CUDA_Accelerator() if present else CPU_Accelerator()
    accelerator.device_count = lambda: present or 1
    monkeypatch.setattr(real_accelerator, "ds_accelerator", accelerator)
    monkeypatch.setattr(deepspeed_launch.subprocess, "Popen", start)
    monkeypatch.setattr(deepspeed_launch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(deepspeed_launch.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sys, "argv", command[command.index("deepspeed.launcher.launch") :])
    deepspeed_launch.main()
    return started


@pytest.mark.parametrize(
    ("present", "visible", "ranks", "expected"),
    [
        (8, None, 2, "0,1"),
        (8, "2,3", 2, "2,3"),
        (8, "2,3", 1, "2"),
        (8, "5,4,3", 2, "5,4"),
        (8, "2,3,-1,4", 2, "2,3"),
        (8, "GPU-8932f937,GPU-7a3b", 2, "GPU-8932f937,GPU-7a3b"),
        (8, "MIG-GPU-8932/1/0,MIG-GPU-8932/2/0", 1, "MIG-GPU-8932/1/0"),
        (0, None, 2, "0,1"),  # has no effect on a machine without GPUs
        (0, "", 2, "0,1"),
        (0, "-1", 2, "0,1"),
    ],
)
def test_deepspeed_gives_the_visible_gpus_to_the_ranks(
    machine, monkeypatch, tmp_path, present, visible, ranks, expected
):
    machine(present, visible)
    control_file = ControlFile("aa", 1, control.RUN, processes_per_node=ranks, port=999)
    found = devices_of_ranks(monkeypatch, launch.command(tmp_path, control_file), present)
    assert found == [(str(rank), expected) for rank in range(ranks)]


def test_more_ranks_than_visible_gpus_are_refused_before_a_launch(machine):
    machine(8, "2,3")
    gpus.gpus_of(2)
    usable = r"3 ranks on a machine with 2 usable GPUs \(CUDA_VISIBLE_DEVICES=2,3\)"
    with pytest.raises(ValueError, match=usable):
        gpus.gpus_of(3)
    machine(8, "-1")
    assert gpus.gpus_of(16) == []  # on the CPU
    machine(1)
    with pytest.raises(ValueError, match="2 ranks on a machine with 1 usable GPU "):
        launch.command(RUN, ONE)


def test_the_cpu_is_chosen_where_no_gpu_is_visible(tmp_path, machine, monkeypatch):
    """DeepSpeed's own choice may be another; that of the user counts. A CPU has two ranks."""
    config = RunConfig(folder=str(tmp_path))
    for present, visible, chosen, ranks in (
        *((0, None, "cpu", 2), (3, "", "cpu", 2), (3, "-1", "cpu", 2)),
        *((3, None, None, 3), (3, "0,2", None, 2), (3, "0", None, 1)),
    ):
        machine(present, visible)
        own = launch.next_control_file(config, Node(), [])
        assert launch.environment(RUN, own).get("DS_ACCELERATOR") == chosen
        assert launch.world_size(SupervisionConfig(), 1) == ranks
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert launch.environment(RUN, own)["DS_ACCELERATOR"] == "cuda"


# --- the launcher's process: started, found again, ended --------------------------------------

STARTED = ControlFile("t", 1, control.RUN)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose launcher starts a rank and waits for it; its processes are ended."""
    rank = "import time; print('rank', flush=True); time.sleep(60)"
    script = (
        "import os, subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {rank!r}], env={{**os.environ, 'RANK': '3'}}, "
        "start_new_session=True)"
    )
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", script])
    yield tmp_path
    processes.end_all(tmp_path, 0.0)


def ranks(job):
    return {member.rank for member in processes.members(job.run) if member.rank}


def start(run):
    job = launch.start(run, STARTED, 0)
    while "rank" not in job.log.read_text():
        assert not job.ended()
    return job


def test_a_launcher_is_started_with_its_token_and_ended_with_its_ranks(run):
    job = start(run)
    assert job.code() is None
    assert ranks(job) == {"3"}
    tokens = {control.token_of(member.environment) for member in processes.members(run)}
    assert tokens == {"t"}
    job.end(5.0)
    assert job.ended()
    assert job.code() != 0
    assert processes.members(run) == []
    assert launching.tail(job.log) == "rank\n"


def test_a_request_to_stop_that_reaches_the_launcher_does_not_end_it(run):
    job = start(run)
    os.kill(job.process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    assert not job.ended()
    job.end(5.0)


def test_the_launcher_of_the_current_attempt_is_found_again_and_no_other(run, monkeypatch):
    # As under srun: all processes inherit it.
    monkeypatch.setenv("SLURM_PROCID", "0")
    job = start(run)
    found = launch.find(run, STARTED)
    assert found is not None
    assert ranks(found) == {"3"}
    assert not found.ended()
    for other in (None, ControlFile("u", 2, control.RUN), ControlFile("t", 1, control.STOP)):
        assert launch.find(run, other) is None
    assert launch.find(run, STARTED, node=1) is None
    found.end(5.0)
    assert found.ended()
    assert found.code() is None
    job.end(0.0)


def test_a_zombie_launcher_has_ended(run):
    child = subprocess.Popen([sys.executable, "-c", ""])
    job = launch.Job(run, STARTED, 0, psutil.Process(child.pid))
    wait_until(job.ended)
    child.wait()
    assert job.ended()


def test_the_description_of_an_exit_code_names_the_signal():
    killed = "(a process was killed by signal 9 (SIGKILL; out of memory?))"
    for code, description in (
        (None, "ended"),
        (76, "ended with code 76"),
        (-15, "was killed by signal 15 (SIGTERM)"),
        (247, f"ended with code 247 {killed}"),
        (137, f"ended with code 137 {killed}"),
    ):
        assert launching.describe_exit(code) == description


def test_each_node_has_its_own_logs(tmp_path):
    assert launch.log_of(tmp_path, STARTED).name == "attempt-001.log"
    assert launch.log_of(tmp_path, STARTED, 2).name == "attempt-001-node-002.log"
    assert launching.tail(launch.log_of(tmp_path, STARTED)) == ""
