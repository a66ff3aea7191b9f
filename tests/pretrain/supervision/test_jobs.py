"""The launcher of an attempt: start it, find it again, end it."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from pretrain.processes import launching, processes
from pretrain.records import control
from pretrain.records.control import ControlFile
from pretrain.supervision import jobs, launch

CONTROL_FILE = ControlFile("t", 1, control.RUN)


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
    job = jobs.start(run, CONTROL_FILE, 0)
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
    found = jobs.find(run, CONTROL_FILE)
    assert found is not None
    assert ranks(found) == {"3"}
    assert not found.ended()
    for other in (None, ControlFile("u", 2, control.RUN), ControlFile("t", 1, control.STOP)):
        assert jobs.find(run, other) is None
    assert jobs.find(run, CONTROL_FILE, node=1) is None
    found.end(5.0)
    assert found.ended()
    assert found.code() is None
    job.end(0.0)


def test_a_zombie_launcher_has_ended(run):
    child = subprocess.Popen([sys.executable, "-c", ""], env={**os.environ})
    job = jobs.Job(run, CONTROL_FILE, 0, psutil.Process(child.pid))
    waiting = threading.Event()
    while not job.ended():
        waiting.wait(0.02)
    child.wait()
    assert job.ended()


@pytest.mark.parametrize(
    ("code", "description"),
    [
        (None, "ended"),
        (1, "ended with code 1"),
        (76, "ended with code 76"),
        (-15, "was killed by signal 15 (SIGTERM)"),
        (247, "ended with code 247 (a process was killed by signal 9 (SIGKILL))"),
        (137, "ended with code 137 (a process was killed by signal 9 (SIGKILL))"),
    ],
)
def test_the_description_of_an_exit_code_names_the_signal(code, description):
    assert launching.describe_exit(code) == description


def test_each_node_has_its_own_logs(tmp_path):
    assert jobs.log_of(tmp_path, CONTROL_FILE).name == "attempt-001.log"
    assert jobs.log_of(tmp_path, CONTROL_FILE, 2).name == "attempt-001-node-002.log"
    assert launching.tail(jobs.log_of(tmp_path, CONTROL_FILE)) == ""
