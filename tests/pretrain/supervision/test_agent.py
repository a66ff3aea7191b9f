"""A machine's agent, and a leader with it, with small scripts in place of the launcher."""

import errno
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from data_prep import files
from pretrain.config.run import RunConfig, SupervisionConfig
from pretrain.exit_codes import EXIT_PREEMPTED
from pretrain.run import ledger
from pretrain.supervision import control as orders
from pretrain.supervision import launch, nodes, processes
from pretrain.supervision.agent import EXIT_FORGOTTEN, Agent
from pretrain.supervision.control import Order
from pretrain.supervision.nodes import Place, Report
from tests.pretrain.supervision.test_supervisor import HEAD

PATIENCE = 60.0
LIMITS = {"grace_seconds": 2.0, "node_silence_seconds": 30.0, "node_wait_seconds": PATIENCE}


class Stage:
    """An agent of node 1 in a thread, and its run's folder."""

    def __init__(self, folder, monkeypatch):
        self.run, self.scripts, self.code = folder, {}, None
        monkeypatch.setattr(launch, "command", self.command)
        # Signals are for the main thread alone.
        monkeypatch.setattr(orders, "_LEAVE", ())
        self.agent = self.thread = None

    def command(self, config, run, order, node=0):
        script = self.scripts[order.attempt, node]
        return [sys.executable, "-c", HEAD.format(run=str(run)) + script]

    def config(self, **limits):
        supervision = SupervisionConfig(**{**LIMITS, **limits})
        return RunConfig(folder=str(self.run), supervision=supervision)

    def start(self, **limits):
        place = Place(1, 2)
        self.agent = Agent(self.config(**limits), place, lambda words: None, poll_seconds=0.05)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        self.code = self.agent.run()

    def report(self):
        return orders.read_json(orders.folder_of(self.run) / "node-001.json") or {}

    def wait_for(self, condition):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_for_state(self, token, state):
        self.wait_for(
            lambda: (self.report().get("token"), self.report().get("state")) == (token, state)
        )

    def join(self):
        self.thread.join(PATIENCE)
        return self.code


@pytest.fixture
def stage(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch)
    yield stage
    if stage.thread:
        orders.give(tmp_path, Order("end", 99, orders.OVER))
        stage.join()
    for node in (0, 1):
        processes.end_all(tmp_path, 0.0, node)


def test_an_agent_starts_what_is_ordered_ends_it_and_leaves_with_the_leader_s_code(stage):
    stage.scripts[1, 1] = "time.sleep(60)"
    stage.start()
    stage.wait_for_state("", nodes.READY)
    orders.give(stage.run, Order("a", 1, orders.RUN, nodes=2))
    stage.wait_for_state("a", nodes.RUNNING)
    stage.wait_for(lambda: processes.members(stage.run, 1))
    orders.give(stage.run, Order("a", 1, orders.STOP, nodes=2))
    stage.wait_for_state("a", nodes.READY)
    assert processes.members(stage.run, 1) == []
    orders.give(stage.run, Order("b", 0, orders.OVER, code=76))
    assert stage.join() == 76


def test_a_launcher_that_ends_by_itself_is_reported(stage):
    stage.scripts[1, 1] = "raise SystemExit(9)"
    stage.start()
    stage.wait_for_state("", nodes.READY)
    orders.give(stage.run, Order("a", 1, orders.RUN, nodes=2))
    stage.wait_for_state("a", nodes.ENDED)
    assert stage.report()["reason"] == "its launcher ended with code 9"


def test_a_process_that_is_stopped_is_reported(stage):
    stage.scripts[1, 1] = "os.kill(os.getpid(), signal.SIGSTOP)"
    stage.start(hang_seconds=1.0)
    stage.wait_for_state("", nodes.READY)
    orders.give(stage.run, Order("a", 1, orders.RUN, nodes=2))
    stage.wait_for(lambda: "has been stopped for 1 s" in stage.report().get("stopped", ""))
    assert stage.report()["state"] == nodes.RUNNING


def test_an_order_for_more_ranks_than_there_are_gpus_is_reported(stage, monkeypatch):
    def refuse(*_):
        raise ValueError("supervision.processes_per_node: 4 ranks on a machine with 2 usable GPUs")

    stage.start()
    stage.wait_for_state("", nodes.READY)
    monkeypatch.setattr(launch, "command", refuse)
    orders.give(stage.run, Order("a", 1, orders.RUN, nodes=2, processes_per_node=4))
    stage.wait_for_state("a", nodes.ENDED)
    reason = "supervision.processes_per_node: 4 ranks on a machine with 2 usable GPUs"
    assert stage.report()["reason"] == f"it could not be started: {reason}"


def test_an_order_that_lay_there_before_is_not_begun(stage):
    """It is long over, or this machine has lost its part of it."""
    orders.give(stage.run, Order("old", 1, orders.RUN, nodes=2))
    stage.start()
    stage.wait_for_state("old", nodes.ENDED)
    assert stage.report()["reason"] == "its agent was started anew"
    assert processes.members(stage.run, 1) == []


def test_a_request_to_leave_is_passed_on_and_without_work_obeyed(stage):
    stage.scripts[1, 1] = "time.sleep(60)"
    stage.start()
    stage.wait_for_state("", nodes.READY)
    orders.give(stage.run, Order("a", 1, orders.RUN, nodes=2))
    stage.wait_for_state("a", nodes.RUNNING)
    stage.agent._requests.count = 1
    stage.wait_for(lambda: orders.stop_requested(stage.run, "a"))
    stage.agent._requests.count = 2
    assert stage.join() == EXIT_PREEMPTED
    assert processes.members(stage.run, 1) == []


def test_a_file_system_that_is_away_for_a_while_ends_no_agent(stage, monkeypatch):
    """What it has begun goes on, and a request to leave is still passed on."""
    stage.scripts[1, 1] = "time.sleep(60)"
    stage.start()
    stage.wait_for_state("", nodes.READY)
    orders.give(stage.run, Order("a", 1, orders.RUN, nodes=2))
    stage.wait_for_state("a", nodes.RUNNING)
    monkeypatch.setattr(files, "_PAUSES", ())

    def away(self, *_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))

    with monkeypatch.context() as patch:
        for name in ("read_bytes", "write_text"):
            patch.setattr(Path, name, away)
        stage.agent._requests.count = 1
        stage.wait_for(lambda: orders.stop_requested(stage.run, "a"))
        assert stage.thread.is_alive()
    stage.wait_for_state("a", nodes.RUNNING)
    orders.give(stage.run, Order("b", 0, orders.OVER, code=0))
    assert stage.join() == 0


def test_an_agent_that_nobody_orders_about_leaves(stage):
    stage.start(node_wait_seconds=0.3)
    assert stage.join() == EXIT_FORGOTTEN


def test_a_machine_has_one_agent(stage):
    stage.start()
    with pytest.raises(ValueError, match=r"node 1 has an agent already"):
        Agent(stage.config(), Place(1, 2))


def test_a_leader_waits_for_the_others_ends_them_together_and_lets_them_go(stage):
    from pretrain.supervision.supervisor import Supervisor

    stage.scripts = {
        (1, 0): "tell('attempt'); time.sleep(60)",
        (1, 1): "time.sleep(0.3); raise SystemExit(9)",
        (2, 0): "tell('attempt'); tell('done')",
        (2, 1): "time.sleep(60)",
    }
    said = []
    leader = Supervisor(stage.config(), Place(0, 2), said.append, poll_seconds=0.05)
    threading.Timer(0.5, stage.start).start()
    assert leader.run() == 0
    assert stage.join() == 0
    told = ledger.read(stage.run / "ledger.jsonl")
    assert [record["kind"] for record in told] == ["attempt", "crash", "attempt", "done"]
    assert told[1]["reason"] == "node 1 ended: its launcher ended with code 9"
    assert launch.hostfile(stage.run).read_text().count("slots=") == 2
    assert processes.members(stage.run, 1) == []


def test_a_new_leader_has_the_others_end_what_the_last_one_ordered(stage):
    from pretrain.supervision.supervisor import Supervisor

    stage.scripts = {
        (1, 1): "time.sleep(60)",
        (2, 0): "tell('attempt'); tell('done')",
        (2, 1): "time.sleep(60)",
    }
    stage.start()
    stage.wait_for_state("", nodes.READY)
    orders.give(stage.run, Order("a", 1, orders.RUN, nodes=2))
    stage.wait_for_state("a", nodes.RUNNING)
    ledger.append(stage.run / "ledger.jsonl", "attempt", token="a", attempt=1, step=0)
    leader = Supervisor(stage.config(), Place(0, 2), lambda words: None, poll_seconds=0.05)
    assert leader.run() == 0
    told = [record["kind"] for record in ledger.read(stage.run / "ledger.jsonl")]
    assert told == ["attempt", "crash", "attempt", "done"]


def test_a_leader_gives_up_when_a_machine_does_not_come(stage):
    from pretrain.supervision.supervisor import EXIT_GAVE_UP, Supervisor

    config = stage.config(node_wait_seconds=0.3)
    leader = Supervisor(config, Place(0, 3), lambda words: None, poll_seconds=0.05)
    assert leader.run() == EXIT_GAVE_UP
    (told,) = ledger.read(stage.run / "ledger.jsonl")
    assert "node 1, 2 did not come" in told["reason"]


def test_a_leader_that_is_asked_to_leave_while_it_waits_does_so(stage):
    from pretrain.supervision.supervisor import Supervisor

    leader = Supervisor(stage.config(), Place(0, 2), lambda words: None, poll_seconds=0.05)
    leader._requests.count = 1
    assert leader.run() == EXIT_PREEMPTED
    assert orders.read(stage.run) == Order(
        orders.read(stage.run).token, 0, orders.OVER, code=EXIT_PREEMPTED
    )


def test_reports_name_the_process_that_gives_them(tmp_path):
    nodes.Reporter(tmp_path, 3).tell(Report("t", nodes.READY))
    report = orders.read_json(orders.folder_of(tmp_path) / "node-003.json")
    assert report["pid"] == os.getpid()
