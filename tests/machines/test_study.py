"""A study whose runs are jobs of a true Slurm, submitted by submitit."""

import os
import signal
import subprocess
import sys

import pytest

from finetune.studies import job
from tests.chaos.conftest import PATIENCE, ROOT
from tests.finetune.studies.conftest import study_file  # noqa: F401 - fixture
from tests.machines.conftest import SBIN, wait_until

pytestmark = pytest.mark.slow


def test_runs_are_jobs_that_go_on_and_are_found_again_when_the_command_is_killed(
    slurm_cluster,
    study_file,  # noqa: F811
    tmp_path,
):
    output = tmp_path / "output"
    words = [sys.executable, "-m", "finetune", "study", str(study_file), "--toy", "--seeds", "1"]
    words += ["--output", str(output), "--engine", "slurm", "--slurm", "timeout_min=20"]
    command = [*slurm_cluster.enter(1), *words]
    variables = {
        "PATH": f"{SBIN}:{os.environ['PATH']}",
        "SLURM_CONF": str(slurm_cluster.folder / "slurm" / "slurm.conf"),
        "PYTHONPATH": str(ROOT),
    }
    environment = {**os.environ, **variables}

    def jobs():
        return {path: path.read_text() for path in output.glob("*/slurm.json")}

    with (tmp_path / "first.txt").open("w") as log:
        first = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        wait_until(lambda: len(jobs()) == 2 or first.poll() is not None)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    before = jobs()
    assert len(before) == 2, (tmp_path / "first.txt").read_text()
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    logs = "".join(path.read_text() for path in output.glob("*/log.txt"))
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    assert jobs() == before
    assert "ALiBi, some − learned, some" in done.stdout
    for path in output.glob(f"*/{job.JOB}"):
        assert (path.parent / job.LOG).read_text().count("$ python -m pretrain export") == 1
