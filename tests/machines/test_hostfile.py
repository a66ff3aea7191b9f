"""Runs on the machines of a hostfile, over a true ssh."""

import signal
import time
from pathlib import Path

import pytest

from tests.chaos.conftest import PATIENCE, Chaos
from tests.machines.conftest import HostfileRun, skip_without, wait_until

pytestmark = pytest.mark.slow


def test_the_machine_of_a_killed_rank_is_named_and_the_run_continues(
    hostfile_run, chaos, undisturbed
):
    chaos.schedule({1: [("die", 1, 6)]})
    hostfile_run.finish(hostfile_run.start(), undisturbed, [0, 4])
    assert "node2" in chaos.records("crash")[0]["reason"]


def kill(host, *words, number=signal.SIGKILL):
    return lambda cluster: cluster.kill(host, *words, number=number)


def cut(seconds):
    def act(cluster):
        cluster.do("cut", 2)
        time.sleep(seconds)
        cluster.do("mend", 2)

    return act


def kill_agent(cluster):
    cluster.kill(2, "chaos.agent")
    wait_until(lambda: cluster.processes(2, "chaos.agent"))
    time.sleep(10)  # to take the rank over


def lose_power(cluster):
    """Longer than ssh takes to notice it."""
    cluster.do("off", 2)
    time.sleep(15)
    cluster.do("on", 2)


CONTINUES, RESTARTS = [0], [0, 4]
RANK = ("-m tests.chaos.fault", "--local_rank=0")


@pytest.mark.parametrize(
    ("fault", "starts", "reason"),
    [
        pytest.param(kill_agent, CONTINUES, "", id="agent"),
        pytest.param(
            kill(2, "chaos.agent", number=signal.SIGSTOP),
            RESTARTS,
            "node 1 (node2) was silent for 60 s",
            id="frozen-agent",
        ),
        pytest.param(cut(12), CONTINUES, "", id="cable"),
        pytest.param(
            kill(2, "launcher.launch"), RESTARTS, "node 1 (node2): its launch", id="launcher"
        ),
        pytest.param(
            kill(2, *RANK, number=signal.SIGSTOP),
            RESTARTS,
            "is stopped, as by SIGSTOP",
            id="frozen-rank",
        ),
        pytest.param(lose_power, RESTARTS, "node 1 (node2)", id="power"),
    ],
)
def test_a_fault_of_a_machine(hostfile_run, chaos, cluster, undisturbed, fault, starts, reason):
    chaos.schedule({1: [("pause", 0, 6)]})
    supervisor = hostfile_run.start()
    chaos.wait_for_pause()
    fault(cluster)
    if starts == CONTINUES:
        time.sleep(5)  # long enough to notice, and to start an agent again
        chaos.go_on()
    hostfile_run.finish(supervisor, undisturbed, starts)
    assert reason in "".join(record["reason"] for record in chaos.records("crash", "hang"))


def test_a_killed_supervisor_leaves_a_run_that_the_next_one_adopts(
    hostfile_run, chaos, cluster, undisturbed
):
    chaos.schedule({1: [("pause", 0, 6)]})
    hostfile_run.start()
    chaos.wait_for_pause()
    cluster.kill(1, "tests.chaos.supervise")
    time.sleep(5)
    supervisor = hostfile_run.start()
    chaos.wait_for(lambda: "attempt 1 still runs; watching it" in chaos.output())
    chaos.go_on()
    hostfile_run.finish(supervisor, undisturbed, CONTINUES)
    assert len(cluster.processes(2, "chaos.agent")) == 0


def test_an_agent_of_a_start_that_was_killed_does_not_serve_the_next_one(
    hostfile_run, chaos, cluster, undisturbed
):
    hostfile_run.start("supervision.node_wait_seconds=1800")
    wait_until(lambda: cluster.processes(2, "chaos.agent"))
    before = cluster.processes(2, "chaos.agent")
    cluster.kill(1, "tests.chaos.supervise")
    time.sleep(10)  # its start
    chaos.schedule({1: [("pause", 0, 6)]})
    supervisor = hostfile_run.start()
    chaos.wait_for_pause()
    assert not {*before} & {*cluster.processes(2, "chaos.agent")}
    chaos.go_on()
    hostfile_run.finish(supervisor, undisturbed, CONTINUES)


def test_a_run_that_is_stopped_does_not_disturb_another_one_on_the_same_machines(
    hostfile_run, chaos, cluster, undisturbed, recipe, tmp_path
):
    (tmp_path / "other").mkdir()
    other = Chaos(tmp_path / "other", recipe.path)
    try:
        for one in (chaos, other):
            one.schedule({1: [("pause", 0, 6)]})
        supervisor = hostfile_run.start()
        stopped = HostfileRun(cluster, other, tmp_path / "other").start()
        for one in (chaos, other):
            one.wait_for_pause()
        for _ in range(2):  # at once, without saving
            cluster.kill(1, "tests.chaos.supervise", str(other.run), number=signal.SIGTERM)
            time.sleep(4)
        assert stopped.wait(PATIENCE) == 76, other.output()
        for host in (1, 2):
            assert not cluster.processes(host, str(other.run))
        chaos.go_on()
        hostfile_run.finish(supervisor, undisturbed, CONTINUES)
    finally:
        other.clean_up()


def test_a_machine_that_cannot_reach_the_first_one_is_waited_for_by_name(
    hostfile_run, chaos, cluster, undisturbed
):
    """Its storage is there, so that its agent reports."""
    chaos.schedule({1: [("pause", 0, 6)]})
    supervisor = hostfile_run.start("supervision.node_wait_seconds=300")
    chaos.wait_for_pause()
    cluster.do("cut", 2)
    cluster.kill(1, *RANK)
    chaos.wait_for(lambda: "node 1 (node2) cannot connect to port" in chaos.output())
    cluster.do("mend", 2)
    hostfile_run.finish(supervisor, undisturbed, RESTARTS)


class MountedRun:
    """The run's folder as node2 sees it: through sshfs, from node1."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        fresh = "dir_cache=no,attr_timeout=0,entry_timeout=0,negative_timeout=0"
        options = "-o", f"{fresh},ServerAliveInterval=2,ServerAliveCountMax=20"
        cluster.run(2, "sshfs", *options, f"node1:{folder}", str(folder))

    def freeze(self):
        self.cluster.kill(2, "sshfs", number=signal.SIGSTOP)

    def thaw(self):
        self.cluster.kill(2, "sshfs", number=signal.SIGCONT)


@pytest.fixture
def mounted(cluster, tmp_path, undisturbed):
    skip_without(("sshfs",))
    return MountedRun(cluster, tmp_path)


def test_a_file_system_that_is_away_for_20_seconds_on_one_machine_ends_nothing(
    mounted, hostfile_run, chaos, undisturbed
):
    chaos.schedule({1: [("pause", 0, 6)]})
    supervisor = hostfile_run.start()
    chaos.wait_for_pause()
    mounted.freeze()
    time.sleep(20)
    mounted.thaw()
    chaos.go_on()
    hostfile_run.finish(supervisor, undisturbed, CONTINUES)


def test_a_machine_that_hears_nothing_any_more_ends_its_processes_itself(
    mounted, hostfile_run, chaos, cluster
):
    chaos.schedule({1: [("pause", 0, 6)]})
    hostfile_run.start()
    chaos.wait_for_pause()
    assert cluster.processes(2, "-m tests.chaos.fault")
    cluster.do("cut", 2)  # of its file system as well
    wait_until(lambda: not cluster.processes(2, "-m tests.chaos.fault"))
    wait_until(lambda: not cluster.processes(2, "deepspeed"))
    assert cluster.processes(2, "chaos.agent")  # it did that


def test_a_machine_that_cannot_be_reached_is_waited_for_by_name(
    hostfile_run, chaos, cluster, undisturbed
):
    cluster.do("cut", 2)
    supervisor = hostfile_run.start()
    chaos.wait_for(lambda: "node2 cannot be reached: " in chaos.output())
    cluster.do("mend", 2)
    hostfile_run.finish(supervisor, undisturbed, CONTINUES)


def test_a_login_that_prints_on_the_line_of_the_answer_does_not_disturb(
    hostfile_run, chaos, cluster
):
    noisy = cluster.folder / "bashrc"
    noisy.write_text("echo -n welcome, you have 3 mails\n")
    cluster.run(2, "mount", "--bind", noisy, Path("~root/.bashrc").expanduser())
    assert cluster.run(1, "ssh", "node2", "true").startswith("welcome")
    hostfile_run.start()
    chaos.wait_for(lambda: "waiting for 1 other node" in chaos.output())
