"""Runs as jobs of Slurm, with an `squeue` of the test's own."""

import os
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from finetune.studies import engines

PATIENCE = 60


@pytest.fixture
def squeue(monkeypatch, tmp_path):
    """Set the jobs in the queue; None: Slurm is away."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "squeue"

    def answer(jobs):
        text = "exit 1" if jobs is None else "\n".join(f"echo {job}" for job in jobs)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    return answer


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """An engine whose submitit gives each run the number of its folder."""
    submitit = pytest.importorskip("submitit")

    def submit(self, command):
        return submitit.SlurmJob(tmp_path / "slurm", command.folder.rpartition("/")[2])

    executor = {"__init__": lambda self, **_: None, "update_parameters": lambda self, **_: None}
    monkeypatch.setattr(submitit, "AutoExecutor", type("E", (), {**executor, "submit": submit}))
    (tmp_path / "slurm").mkdir()
    return engines.Slurm(tmp_path / "slurm", {})


def test_a_job_that_left_the_queue_without_a_result_has_failed(
    squeue, slurm, tmp_path, monkeypatch
):
    """It was cancelled, or its node is gone; there need not be an sacct to say so."""
    folders = [tmp_path / name for name in ("17", "18", "19")]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "slurm" / "18_0_result.pkl").write_bytes(pickle.dumps(("success", 76)))
    codes = {}
    answers = iter([[17, 18, 19], [17, 18, 19], None, [19], [19], []])
    monkeypatch.setattr(
        engines, "time", SimpleNamespace(sleep=lambda seconds: squeue(next(answers, [])))
    )
    squeue([17, 18, 19])
    seen = []
    slurm(folders, lambda folder, code: codes.setdefault(folder.name, code), seen.append)
    assert codes == {"17": 1, "18": 76, "19": 1}
    assert [len(running) for running in seen] == [2, 2, 2, 2, 1, 1, 0]


def test_a_job_whose_time_is_up_waits_until_its_run_has_saved(tmp_path):
    pytest.importorskip("submitit")
    slow = tmp_path / "python"
    slow.write_text(
        f'#!/bin/sh\ntrap "sleep 0.5; echo saved > {tmp_path}/saved; exit 76" TERM\n'
        f"touch {tmp_path}/begun\nwhile true; do sleep 0.1; done\n"
    )
    slow.chmod(0o755)
    code = (
        "import os, signal, sys\nfrom finetune.studies import engines, job\n"
        "job.sys = type('S', (), {'executable': sys.argv[1]})\n"
        "command = engines.Command(sys.argv[2])\n"
        "def handle(*_):\n"
        "    command.checkpoint()\n"
        "    os._exit(0 if os.path.exists(sys.argv[2] + '/saved') else 1)\n"
        "signal.signal(signal.SIGUSR2, handle)\n"
        "command()"
    )
    words = [sys.executable, "-c", code, str(slow), str(tmp_path)]
    process = subprocess.Popen(words, start_new_session=True)
    until = time.monotonic() + PATIENCE
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGUSR2)
    assert process.wait(PATIENCE) == 0
    assert (tmp_path / "saved").exists()
