"""Runs on the machines of a hostfile, over a true ssh."""

import signal
import time
from pathlib import Path

import pytest

from tests.chaos.fixtures import PATIENCE, Chaos
from tests.machines.conftest import HostfileRun, skip_without
from tests.running import wait_until

pytestmark = pytest.mark.slow


RANK = ("-m tests.chaos.fault", "--local_rank=0")


def lose_power(cluster):
    """Longer than ssh takes to notice it."""
    cluster.do("off", 2)
    time.sleep(8)
    cluster.do("on", 2)


def test_faults_of_processes_and_machines_strike_one_run(hostfile_run, chaos, cluster, undisturbed):
    """Some end an attempt, and are named; others do not. All but the first strike at step 6."""
    # A supervisor that is killed during its start leaves an agent, which must not serve the next.
    hostfile_run.start("supervision.node_wait_seconds=1800")
    wait_until(lambda: cluster.processes(2, "chaos.agent"))
    before = cluster.processes(2, "chaos.agent")
    cluster.kill(1, "tests.chaos.supervise")
    time.sleep(5)  # its start

    pause = [("pause", 0, 6)]
    chaos.schedule({**dict.fromkeys((1, 2, 3, 4, 5), pause), 6: [("die", 1, 6)]})
    patient = "supervision.node_wait_seconds=300", "supervision.hang_seconds=45"
    supervisor = hostfile_run.start(*patient)
    chaos.wait_for_pause()
    assert not {*before} & {*cluster.processes(2, "chaos.agent")}

    cluster.kill(2, "chaos.agent")
    wait_until(lambda: cluster.processes(2, "chaos.agent"))
    time.sleep(5)  # to take the rank over
    cluster.do("cut", 2)
    time.sleep(8)
    cluster.do("mend", 2)
    time.sleep(4)  # long enough to notice, and to start an agent again
    cluster.kill(1, "tests.chaos.supervise")
    time.sleep(3)
    before = {*cluster.processes(2, "chaos.agent")}
    supervisor = hostfile_run.start(*patient)
    chaos.wait_for(lambda: "attempt 1 still runs; watching it" in chaos.output())
    wait_until(lambda: {*cluster.processes(2, "chaos.agent")} - before)
    time.sleep(5)  # a launcher that ends before would be that of a lost agent

    def strike(number, reason, fault):
        """Act while an attempt pauses, and wait for the next one, which pauses, too."""
        assert len(chaos.start_steps()) == number, chaos.output()
        fault()
        chaos.wait_for(lambda: len(chaos.start_steps()) == number + 1)
        assert reason in chaos.records("crash", "hang")[-1]["reason"]
        chaos.go_on()
        chaos.wait_for_pause()

    def cut_and_lose_a_rank():
        cluster.do("cut", 2)
        cluster.kill(1, *RANK)
        chaos.wait_for(lambda: "waiting for node 1 (node2) to connect to port" in chaos.output())
        cluster.do("mend", 2)

    stop = signal.SIGSTOP
    strike(1, "node 1 (node2): its launch", lambda: cluster.kill(2, "launcher.launch"))
    strike(2, "is stopped, as by SIGSTOP", lambda: cluster.kill(2, *RANK, number=stop))
    silent = "node 1 (node2) was silent for 30 s"
    strike(3, silent, lambda: cluster.kill(2, "chaos.agent", number=stop))
    strike(4, "node 1 (node2)", lambda: lose_power(cluster))
    assert len(chaos.start_steps()) == 5
    cut_and_lose_a_rank()
    chaos.go_on()
    hostfile_run.finish(supervisor, undisturbed, [0, 4, 4, 4, 4, 4, 4])
    assert "node2" in chaos.records("crash")[-1]["reason"]


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
        hostfile_run.finish(supervisor, undisturbed, [0])
    finally:
        other.clean_up()


def test_a_file_system_that_is_away_on_one_machine(hostfile_run, chaos, cluster, tmp_path):
    """For 8 seconds it ends nothing; together with the cable, its machine ends its ranks."""
    skip_without(("sshfs",))
    # The run's folder as node2 sees it: through sshfs, from node1.
    fresh = "dir_cache=no,attr_timeout=0,entry_timeout=0,negative_timeout=0"
    options = "-o", f"{fresh},ServerAliveInterval=2,ServerAliveCountMax=20"
    cluster.run(2, "sshfs", *options, f"node1:{tmp_path}", str(tmp_path))
    chaos.schedule({1: [("pause", 0, 6), ("pause", 0, 10)]})
    hostfile_run.start()
    chaos.wait_for_pause()
    cluster.kill(2, "sshfs", number=signal.SIGSTOP)
    time.sleep(8)
    cluster.kill(2, "sshfs", number=signal.SIGCONT)
    chaos.go_on()
    chaos.wait_for_pause()
    assert chaos.start_steps() == [0], chaos.output()
    assert cluster.processes(2, *RANK)
    cluster.do("cut", 2)  # of its file system as well
    wait_until(lambda: not cluster.processes(2, *RANK))
    wait_until(lambda: not cluster.processes(2, "deepspeed"))
    assert cluster.processes(2, "chaos.agent")  # it did that


def test_a_machine_that_cannot_be_reached_is_waited_for_by_name(
    hostfile_run, chaos, cluster, undisturbed
):
    """Its login prints on the line of the answer, which does not disturb."""
    noisy = cluster.folder / "bashrc"
    noisy.write_text("echo -n welcome, you have 3 mails\n")
    cluster.run(2, "mount", "--bind", noisy, Path("~root/.bashrc").expanduser())
    assert cluster.run(1, "ssh", "node2", "true").startswith("welcome")
    cluster.do("cut", 2)
    supervisor = hostfile_run.start()
    chaos.wait_for(lambda: "node2 cannot be reached: " in chaos.output())
    cluster.do("mend", 2)
    hostfile_run.finish(supervisor, undisturbed, [0])
