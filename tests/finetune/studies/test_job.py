"""One run of a study as a process: stages are done once, whatever ends it."""

import signal
import subprocess
import sys

import pytest

from data_prep.common import children
from data_prep.common.exit_codes import EXIT_INTERRUPTED
from finetune.studies import job
from finetune.studies.job import Stage
from tests.running import python, wait_until

PATIENCE = 60


@pytest.fixture
def commands(monkeypatch):
    """What was run instead of the stages' commands, and what each returns."""
    ran, codes = [], {}

    def run(arguments, descriptors):
        ran.append(arguments[1])
        return codes.get(arguments[1], 0)

    monkeypatch.setattr(children, "run", run)
    return ran, codes


def test_stages_that_are_done_are_not_done_again_and_others_make_their_folder_anew(
    commands, tmp_path
):
    """Also one that a killed job made and could not mark."""
    ran, codes = commands
    names = ("train", "export", "glue")
    job.write(tmp_path, [Stage(name, [name], makes=str(tmp_path / name)) for name in names])
    codes["export"] = 7
    assert job.do(tmp_path) == 7
    assert [stage.name for stage in job.stages_left(tmp_path)] == ["export", "glue"]
    codes.clear()
    for name in names:
        (tmp_path / name).mkdir()
    assert job.do(tmp_path) == 0
    assert ran == ["train", "export", "export", "glue"]
    assert job.stages_left(tmp_path) == []
    left = [name for name in names if (tmp_path / name).exists()]
    assert left == ["train"], "`export` refuses a folder that is not empty"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_saving_holds_up_the_next_job_of_its_run(tmp_path, number):
    """`supervise` gets SIGTERM, saves and ends, also where the job itself is killed."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom finetune.studies import job\n"
        "sys.executable = sys.argv[1]\n"
        "sys.exit(job.do(Path(sys.argv[2])))"
    )
    job.write(tmp_path, [Stage("train", ["supervise"])])
    saving = tmp_path / "python"
    saving.write_text(
        f'#!/bin/sh\ntrap "sleep 1; echo saved > {tmp_path}/saved; exit 76" TERM\n'
        f"touch {tmp_path}/begun\nwhile true; do sleep 0.1; done\n"
    )
    saving.chmod(0o755)
    quick = tmp_path / "next"
    quick.write_text(f"#!/bin/sh\ntest -e {tmp_path}/saved\n")
    quick.chmod(0o755)
    process = subprocess.Popen([sys.executable, "-c", code, str(saving), str(tmp_path)])
    wait_until((tmp_path / "begun").exists)
    process.send_signal(number)
    if number == signal.SIGTERM:
        assert process.wait(PATIENCE) == EXIT_INTERRUPTED
        assert (tmp_path / "saved").exists()
    python("-c", code, quick, tmp_path)
    process.wait(PATIENCE)
