"""The batch script beside the recipes, with small programs in place of Slurm's."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "pretrain" / "recipes" / "supervise.sbatch"


@pytest.fixture
def submit(tmp_path):
    """Start the script with an srun that is a line of shell; tells what scontrol was told."""

    def program(name, line):
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\ncd {tmp_path}\n{line}\n")
        path.chmod(0o755)

    def start(srun):
        program("srun", f'echo "$@" > words\n{srun}')
        program("scontrol", 'echo "$@" > requeued')
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        return subprocess.Popen(["bash", SCRIPT, "demo", "folder=a b"], env=os.environ | variables)

    return start


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (76, True)])
def test_a_job_that_was_asked_to_leave_is_queued_again_and_no_other(
    submit, tmp_path, code, requeued
):
    assert submit(f"exit {code}").wait(60) == code
    assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "words").read_text().endswith("-m pretrain supervise demo folder=a b\n")
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_slurm_s_signal_reaches_the_agents_and_their_end_is_waited_for(submit, tmp_path):
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
