"""Runs as tasks of Ray, each test in a process of its own: Ray starts threads."""

import functools

import pytest

from finetune.studies import job
from finetune.studies.job import Stage
from tests.running import python

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
PROGRAM = """
import sys
from pathlib import Path
from finetune.studies.job import do_on_ray

ended = {}
try:
    folders = [*map(Path, sys.argv[2:])]
    do_on_ray(folders, lambda folder, code: ended.update({folder.name: code}), int(sys.argv[1]), 1)
except ValueError as error:
    print(error)
print(sorted(ended.items()))
"""
LOST_MACHINE = """
import fcntl, os, subprocess, sys, time
import psutil
from ray.cluster_utils import Cluster

def working():
    lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    return any("finetune.studies.job" in line and line[-1].endswith(FOLDER) for line in lines)

PROGRAM, FOLDER = sys.argv[1:]
cluster = Cluster()
cluster.add_node(num_cpus=0, include_dashboard=False)
first = cluster.add_node(num_cpus=1)
os.environ["RAY_ADDRESS"] = cluster.address
with open(FOLDER + "/lock", "a") as lock:  # as a command that still works on the run
    fcntl.flock(lock, fcntl.LOCK_EX)
    study = subprocess.Popen([sys.executable, "-c", PROGRAM, "1", FOLDER])
    while not working():
        time.sleep(0.1)
    cluster.remove_node(first, allow_graceful=False)
    while working():
        time.sleep(0.1)
    cluster.add_node(num_cpus=1)
study.wait()
cluster.shutdown()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a program in the folder of the test; returns what it prints."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return functools.partial(python, "-c", folder=tmp_path)


def test_each_run_is_a_task_in_the_folder_of_the_command(run, tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: small\n")
    for name, recipe in (("right", "mine.yaml"), ("wrong", "nowhere.yaml")):
        job.write(tmp_path / name, [Stage("show", ["show", recipe])])
    text = run(PROGRAM, "1", "right", "wrong")
    assert text.endswith("[('right', 0), ('wrong', 2)]\n")
    assert (tmp_path / "right" / "show.done").exists()
    assert "nowhere.yaml" in (tmp_path / "wrong" / job.LOG).read_text()


def test_a_run_whose_machine_is_lost_goes_on_on_another(run, tmp_path):
    job.write(tmp_path / "one", [Stage("show", ["show", "small"])])
    assert "[('one', 0)]" in run(LOST_MACHINE, PROGRAM, "one")
    assert (tmp_path / "one" / job.LOG).read_text().count("$ zeroclap show") == 1


def test_a_run_that_fits_no_machine_is_refused(run, tmp_path):
    job.write(tmp_path / "large", [Stage("show", ["show", "small"])])
    text = run(PROGRAM, "999", "large")
    assert "a run has 999 ranks, and no machine of the cluster has more than" in text
