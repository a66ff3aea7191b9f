"""Runs as jobs of Slurm, with an `squeue` of the test's own."""

import pickle
from types import SimpleNamespace

import pytest

from finetune.studies import engines


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
