"""The batch script for Slurm; small programs replace srun and scontrol."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "pretrain" / "recipes" / "supervise.sbatch"


@pytest.fixture
def submit(tmp_path):
    """Start the script with a line of shell as srun; scontrol writes its arguments to a file."""

    def program(name, line):
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\ncd {tmp_path}\n{line}\n")
        path.chmod(0o755)

    def start(srun):
        program("srun", f'echo "$@" > arguments\n{srun}')
        program("scontrol", 'echo "$@" > requeued')
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        return subprocess.Popen(["bash", SCRIPT, "demo", "folder=a b"], env=os.environ | variables)

    return start


@pytest.mark.parametrize("code", [0, 1, 76])
def test_without_a_signal_the_job_ends_with_the_code_of_its_agents(submit, tmp_path, code):
    assert submit(f"exit {code}").wait(60) == code
    assert not (tmp_path / "requeued").exists()
    assert (tmp_path / "arguments").read_text().endswith(" zeroclap supervise demo folder=a b\n")


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (76, True)])
def test_the_signal_before_the_time_limit_reaches_the_agents(submit, tmp_path, code, requeued):
    """Sent again and again, at every moment of the script's wait for their end."""
    script = submit(f"trap 'exit {code}' USR1; touch ready; while true; do sleep 0.05; done")
    _send(signal.SIGUSR1, script, tmp_path)
    assert script.returncode == code
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_a_cancelled_job_waits_for_its_agents_and_stays_cancelled(submit, tmp_path):
    """Slurm sends TERM to the agents itself; here they end when they like."""
    script = submit("touch ready; sleep 1; exit 76")
    _send(signal.SIGTERM, script, tmp_path)
    assert script.returncode == 76
    assert not (tmp_path / "requeued").exists()


def _send(number, script, folder):
    """Once its agents are ready, send a signal to the script until it ends."""
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while script.poll() is None:
        assert time.monotonic() < deadline
        script.send_signal(number)
        time.sleep(0.03)
