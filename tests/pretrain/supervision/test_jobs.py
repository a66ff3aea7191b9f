"""An attempt's launcher: started, found again, ended."""

import os
import subprocess
import sys
import threading
import time

import pytest

from pretrain.config.run import RunConfig, SupervisionConfig
from pretrain.supervision import control as orders
from pretrain.supervision import jobs, launch, processes
from pretrain.supervision.control import Order

ORDER = Order("t", 1, orders.RUN)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose launcher starts a rank and waits for it; ended in any case."""
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
    return {member.rank for member in job.members() if member.rank}


def start(run):
    log = jobs.log_of(run, 1)
    job = jobs.start(RunConfig(), run, ORDER, 0, log)
    while "rank" not in log.read_text():
        assert not job.ended()
    return job


def test_a_launcher_is_started_with_the_marks_and_ended_with_its_ranks(run):
    job = start(run)
    assert job.code() is None
    assert ranks(job) == {"3"}
    tokens = {orders.token_of(member.environment) for member in processes.members(run)}
    assert tokens == {"t"}
    job.end(5.0)
    assert job.ended()
    assert job.code() != 0
    assert processes.members(run) == []
    assert jobs.tail(jobs.log_of(run, 1)) == "rank\n"


@pytest.mark.parametrize(("launcher", "expected"), [("deepspeed", "cpu"), ("srun", "none")])
def test_a_supervisor_without_gpus_says_so_to_its_own_machine_s_ranks_only(
    tmp_path, monkeypatch, launcher, expected
):
    """srun passes its environment on, and its ranks may have GPUs."""
    script = "import os; print(os.environ.get('DS_ACCELERATOR', 'none'))"
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(launch.gpus, "visible_gpus", lambda environ: [])
    monkeypatch.delenv("DS_ACCELERATOR")
    config = RunConfig(supervision=SupervisionConfig(launcher=launcher))
    log = jobs.log_of(tmp_path, 1)
    job = jobs.start(config, tmp_path, ORDER, 0, log)
    while not job.ended():
        time.sleep(0.02)
    assert log.read_text().strip() == expected


def test_the_launcher_of_an_order_that_counts_is_found_again_and_of_no_other(run, monkeypatch):
    # As below srun: what Slurm says of this process is inherited by all.
    monkeypatch.setenv("SLURM_PROCID", "0")
    job = start(run)
    found = jobs.find(run, ORDER)
    assert found is not None
    assert ranks(found) == {"3"}
    assert not found.ended()
    for other in (None, Order("u", 2, orders.RUN), Order("t", 1, orders.STOP)):
        assert jobs.find(run, other) is None
    assert jobs.find(run, ORDER, node=1) is None
    found.end(5.0)
    assert found.ended()
    assert found.code() is None
    job.end(0.0)


def test_a_dead_launcher_that_nobody_buries_has_ended(run):
    child = subprocess.Popen([sys.executable, "-c", ""], env={**os.environ})
    job = jobs.Job(run, 0, child.pid)
    waiting = threading.Event()
    while not job.ended():
        waiting.wait(0.02)
    child.wait()
    assert job.ended()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "ended"),
        (1, "ended with code 1"),
        (76, "ended with code 76"),
        (-15, "was killed by signal 15 (SIGTERM)"),
        (247, "ended with code 247 (a process was killed by signal 9 (SIGKILL))"),
        (137, "ended with code 137 (a process was killed by signal 9 (SIGKILL))"),
    ],
)
def test_an_exit_code_tells_the_signal_where_there_was_one(code, words):
    assert jobs.in_words(code) == words


def test_each_machine_has_logs_of_its_own(tmp_path):
    assert jobs.log_of(tmp_path, 3).name == "attempt-003.log"
    assert jobs.log_of(tmp_path, 3, 2).name == "attempt-003-node-002.log"
    assert jobs.tail(jobs.log_of(tmp_path, 3)) == ""
