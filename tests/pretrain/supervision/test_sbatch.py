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


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (76, True)])
def test_only_a_job_that_was_asked_to_stop_is_queued_again(submit, tmp_path, code, requeued):
    assert submit(f"exit {code}").wait(60) == code
    assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "arguments").read_text().endswith("-m pretrain supervise demo folder=a b\n")
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_the_signal_from_slurm_reaches_the_agents_and_the_script_waits_for_their_end(
    submit, tmp_path
):
    script = submit("trap 'exit 76' USR1; touch ready; while true; do sleep 0.05; done")
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while script.poll() is None:
        assert time.monotonic() < deadline
        script.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert script.returncode == 76
    assert (tmp_path / "requeued").exists()
