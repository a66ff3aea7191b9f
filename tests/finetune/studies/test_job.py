"""One run of a study as a process: stages are done once, whatever ends it."""

import signal
import subprocess
import sys
import time

import pytest

from finetune.studies import job
from finetune.studies.job import Stage

PATIENCE = 60


@pytest.fixture
def commands(monkeypatch):
    """What was run instead of the stages' commands, and what each returns."""
    ran, codes = [], {}

    def run(arguments):
        ran.append(arguments[1])
        return codes.get(arguments[1], 0)

    monkeypatch.setattr(job, "_run", run)
    return ran, codes


def test_stages_that_are_done_are_not_done_again(commands, tmp_path):
    ran, codes = commands
    job.write(tmp_path, [Stage(name, ["pretrain", name]) for name in ("train", "export", "glue")])
    codes["export"] = 7
    assert job.do(tmp_path) == 7
    assert [stage.name for stage in job.stages_left(tmp_path)] == ["export", "glue"]
    codes.clear()
    assert job.do(tmp_path) == 0
    assert ran == ["train", "export", "export", "glue"]
    assert job.stages_left(tmp_path) == []


def test_only_commands_of_the_project_are_run(tmp_path):
    job.write(tmp_path, [Stage("train", ["http.server"])])
    with pytest.raises(ValueError, match="not a command"):
        job.do(tmp_path)


def test_a_request_to_stop_reaches_the_command_and_waits_for_it(tmp_path):
    """`supervise` gets SIGTERM, saves and ends; the job does not end before it."""
    code = (
        "import sys\nfrom finetune.studies import job\n"
        "job.sys = type('S', (), {'executable': sys.argv[1]})\n"
        "sys.exit(job._run(sys.argv[2:]))"
    )
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\ntrap "sleep 1; echo saved > {tmp_path}/saved; exit 76" TERM\n')
    slow.write_text(slow.read_text() + f"touch {tmp_path}/begun\nwhile true; do sleep 0.1; done\n")
    slow.chmod(0o755)
    process = subprocess.Popen([sys.executable, "-c", code, str(slow), "pretrain", "supervise"])
    until = time.monotonic() + PATIENCE
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
