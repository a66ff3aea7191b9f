"""Jobs of a true Slurm on two hosts, submitted with the sbatch file of the recipes."""

import sys
import time

import pytest

from pretrain.records import control
from tests.chaos.fault import PLAN
from tests.chaos.fixtures import ROOT, SHORT
from tests.machines.conftest import SBIN, mount_read_only
from tests.running import wait_until

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "pretrain" / "recipes" / "supervise.sbatch"
PROGRAM = f"""#!/bin/sh
# zeroclap supervise ARGUMENTS: with the faults that are planned.
shift
exec {sys.executable} -m tests.chaos.supervise "$@"
"""


class Job:
    """A run that is a job of Slurm, with one rank on each of two nodes; it pauses at step 6."""

    def __init__(self, cluster, chaos, folder):
        self.cluster, self.chaos, self.output = cluster, chaos, folder / "supervisor.log"
        self.folder = folder
        chaos.schedule({1: [("pause", 0, 6)]})

    def submit(self, *options):
        (self.folder / "bin").mkdir(exist_ok=True)
        (self.folder / "bin" / "zeroclap").write_text(PROGRAM)
        (self.folder / "bin" / "zeroclap").chmod(0o755)
        settings = [f"folder={self.chaos.run}", *SHORT, "supervision.processes_per_node=1"]
        self.number = self.cluster.slurm(
            "sbatch",
            "--parsable",
            f"--output={self.output}",
            f"--chdir={ROOT}",
            f"--export=PATH,PYTHONPATH,OMP_NUM_THREADS,{PLAN}",
            *options,
            SCRIPT,
            self.chaos.recipe,
            *settings,
            PATH=f"{self.folder / 'bin'}:{SBIN}",
            PYTHONPATH=str(ROOT),
            **{PLAN: str(self.chaos.plan)},
        ).strip()

    def go_on_when_asked_to_stop(self):
        """Let the ranks go on once the request has reached them, and wait until they have saved.

        On a busy machine it may come before they pause.
        """

        def saved():
            token = self.chaos.records("attempt")[0]["token"]
            if control.stop_requested(self.chaos.run, token):
                (self.chaos.run / "paused").unlink(missing_ok=True)
            return self.chaos.kinds("preempted")

        self.chaos.wait_for(lambda: self.chaos.records("attempt") and saved())

    def wait_for_state(self, state):
        wait_until(lambda: self.cluster.job(self.number)["JobState"] == state)

    def restarts(self):
        return int(self.cluster.job(self.number)["Restarts"])

    def finish(self, undisturbed, restarts):
        """Assert that the job ends well, with the weights of a run without faults."""
        done = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        wait_until(lambda: self.cluster.job(self.number)["JobState"] in done)
        assert self.cluster.job(self.number)["JobState"] == "COMPLETED", self.chaos.output()
        assert self.restarts() == restarts
        self.chaos.assert_same_as(undisturbed)


@pytest.fixture
def job(slurm_cluster, chaos, tmp_path):
    return Job(slurm_cluster, chaos, tmp_path)


def test_a_job_that_reaches_its_time_limit_saves_is_queued_again_and_completes(
    job, slurm_cluster, chaos, undisturbed
):
    job.submit("--time=1", "--signal=B:USR1@35")
    job.go_on_when_asked_to_stop()
    wait_until(lambda: job.restarts() == 1)
    slurm_cluster.slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    job.finish(undisturbed, restarts=1)
    first, saved = chaos.start_steps()
    assert first == 0 < saved, chaos.output()
    assert chaos.kinds("preempted", "crash", "hang") == ["preempted"]


def test_a_cancelled_job_saves_and_stays_cancelled(job, slurm_cluster, chaos):
    job.submit()
    chaos.wait_for_pause()
    slurm_cluster.slurm("scancel", job.number)
    job.go_on_when_asked_to_stop()
    job.wait_for_state("CANCELLED")
    wait_until(lambda: not slurm_cluster.processes(1, "tests.chaos"))
    wait_until(lambda: not slurm_cluster.processes(2, "tests.chaos"))
    assert chaos.kinds()[-2:] == ["commit", "preempted"], chaos.output()
    assert chaos.records("commit")[-1]["step"] == 7
    assert (slurm_cluster.job(job.number)["JobState"], job.restarts()) == ("CANCELLED", 0)


def test_faults_of_processes_jobs_and_nodes_strike_one_run(job, slurm_cluster, chaos, undisturbed):
    """A supervisor and an agent, a step of the job, a node, and the script of the job."""
    chaos.schedule(dict.fromkeys((1, 2, 3), [("pause", 0, 6)]))
    job.submit()
    chaos.wait_for_pause()
    words = sys.executable, "tests.chaos.supervise"
    for host in (1, 2):
        (killed,) = slurm_cluster.processes(host, *words)
        slurm_cluster.kill(host, *words)
        wait_until(lambda: [p for p in slurm_cluster.processes(host, *words) if p != killed])  # noqa: B023
    time.sleep(5)  # to take the ranks over
    assert chaos.start_steps() == [0], chaos.output()

    def next_attempt(number):
        chaos.wait_for(lambda: len(chaos.start_steps()) == number)
        chaos.go_on()
        chaos.wait_for_pause()

    slurm_cluster.slurm("scancel", f"{job.number}.0")
    next_attempt(2)
    assert job.restarts() == 0

    slurm_cluster.do("off", 2)
    job.wait_for_state("PENDING")
    slurm_cluster.do("on", 2)
    slurm_cluster.do("daemons", 2, script="slurm.sh")
    next_attempt(3)
    assert job.restarts() == 1

    first = job.number
    job.submit(f"--dependency=afternotok:{first}")
    slurm_cluster.kill(1, "slurm_script")
    job.finish(undisturbed, restarts=0)
    assert slurm_cluster.job(first)["JobState"] == "FAILED"
    assert chaos.start_steps() == [0, 4, 4, 4], chaos.output()


def test_a_node_that_cannot_write_to_the_folder_is_refused_at_once_by_name(
    job, slurm_cluster, chaos
):
    mount_read_only(slurm_cluster, chaos.run)
    job.submit("--no-requeue")
    job.wait_for_state("FAILED")
    (gave_up,) = chaos.records("gave-up")
    assert "node 1 (node2) is refused: [Errno 30] Read-only file system" in gave_up["reason"]
