"""What the first machine knows of the others, and which machine this is."""

import pytest

from pretrain.supervision import nodes
from pretrain.supervision.nodes import ENDED, READY, RUNNING, Others, Place, Report, Reporter, place

SLURM = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}


def test_a_machine_is_the_only_one_unless_the_user_or_slurm_says_otherwise():
    assert place(None, None, None, {}) == Place()
    assert place(1, 3, "10.0.0.1", {}) == Place(1, 3, "10.0.0.1")
    below_srun = place(None, None, None, {**SLURM, "SLURMD_NODENAME": "gpu7"})
    assert below_srun == Place(1, 2, "gpu7")
    assert place(0, None, "a", SLURM) == Place(0, 2, "a")
    # A batch script, or a step of many tasks on a machine: not our agents.
    assert place(None, None, None, {"SLURM_NODEID": "1"}) == Place()
    assert place(None, None, None, {**SLURM, "SLURM_STEP_NUM_TASKS": "16"}) == Place()


def test_a_number_that_is_not_below_their_count_is_refused():
    with pytest.raises(ValueError, match="--node-rank 2 with --nodes 2"):
        Place(2, 2)


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def others(tmp_path, now):
    Reporter(tmp_path, 1).tell(Report("long ago", RUNNING))
    return Others(tmp_path, 3, silence_seconds=60, clock=lambda: now[0])


def test_what_lay_there_before_is_no_sign_of_life(tmp_path, others):
    others.look()
    assert others.missing() == [1, 2]
    for node in (1, 2):
        reporter = Reporter(tmp_path, node)
        for _ in range(2):
            reporter.tell(Report("", READY))
    others.look()
    assert others.missing() == []


def test_a_machine_with_processes_of_the_last_attempt_cannot_take_another(tmp_path, others):
    one, two = Reporter(tmp_path, 1), Reporter(tmp_path, 2)
    for state in (READY, RUNNING):
        one.tell(Report("t", state))
        two.tell(Report("t", READY))
    others.look()
    assert others.busy() == others.missing() == [1]


def test_silence_and_a_launcher_s_end_are_complained_of(tmp_path, now, others):
    one, two = Reporter(tmp_path, 1), Reporter(tmp_path, 2)
    for reporter in (one, two, one, two):
        reporter.tell(Report("t", RUNNING))
    others.look()
    assert others.complaint("t") == ""
    now[0] += 50
    one.tell(Report("t", RUNNING))
    others.look()
    now[0] += 11
    assert others.complaint("t") == "node 2 was not heard for 60 s"
    assert others.busy() == [1]
    one.tell(Report("t", ENDED, "its launcher ended with code 9"))
    two.tell(Report("t", RUNNING))
    others.look()
    assert others.complaint("t") == "node 1 ended: its launcher ended with code 9"
    assert others.complaint("another") == ""


def test_a_process_that_is_stopped_on_another_machine_is_told_of_that_attempt_alone(
    tmp_path, others
):
    one = Reporter(tmp_path, 1)
    one.tell(Report("t", RUNNING))
    others.look()
    assert others.stopped("t") == ""
    one.tell(Report("t", RUNNING, stopped="rank 3 (pid 9) has been stopped for 60 s"))
    others.look()
    assert others.stopped("t") == "on node 1 rank 3 (pid 9) has been stopped for 60 s"
    assert others.stopped("another") == ""
    assert others.complaint("t") == ""
    assert others.busy() == [1]


def test_a_leader_that_takes_over_gives_the_others_time_to_be_heard(tmp_path, now, others):
    assert others.complaint("t") == ""
    now[0] += 61
    assert others.complaint("t") == "node 1, 2 was not heard for 60 s"
    assert nodes.Others(tmp_path, 1, 60).complaint("t") == ""
