"""Runs as tasks of Ray, each test in a process of its own: Ray starts threads."""

import os
import subprocess
import sys

import pytest

from finetune.studies import job
from finetune.studies.job import Stage

pytest.importorskip("ray")
PROGRAM = """
import sys
from pathlib import Path
from finetune.studies.on_ray import Ray

ended = {}
try:
    Ray(int(sys.argv[1]), jobs=1)(
        [*map(Path, sys.argv[2:])], lambda folder, code: ended.update({folder.name: code}), print
    )
except ValueError as error:
    print(error)
print(sorted(ended.items()))
"""


def run(tmp_path, *words):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_each_run_is_a_task_in_the_folder_of_the_command(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: small\n")
    for name, recipe in (("right", "mine.yaml"), ("wrong", "nowhere.yaml")):
        job.write(tmp_path / name, [Stage("show", ["pretrain", "show", recipe])])
    assert run(tmp_path, "1", "right", "wrong").endswith("[('right', 0), ('wrong', 2)]\n")
    assert (tmp_path / "right" / "show.done").exists()
    assert "nowhere.yaml" in (tmp_path / "wrong" / job.LOG).read_text()


@pytest.mark.slow
def test_a_run_that_fits_no_machine_is_refused(tmp_path):
    job.write(tmp_path / "large", [Stage("show", ["pretrain", "show", "small"])])
    text = run(tmp_path, "999", "large")
    assert "a run has 999 ranks, and no machine of the cluster has more than" in text
