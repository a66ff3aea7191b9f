"""The agent of a node, alone and with a supervisor; small scripts replace the launcher."""

import errno
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from data_prep.common import children, files
from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE
from pretrain.config.run import RunConfig
from pretrain.config.sections import SupervisionConfig
from pretrain.processes import processes
from pretrain.records import control, folder, ledger
from pretrain.records.control import ControlFile
from pretrain.records.folder import SUPERVISOR_LOCK, sign_of
from pretrain.supervision import agent, launch, nodes, supervisor
from pretrain.supervision.agent import Agent
from pretrain.supervision.nodes import Node, Report, Reporter
from tests.pretrain.builders import slow
from tests.pretrain.supervision.test_supervisor import HEAD
from tests.running import wait_until

PATIENCE = 60.0


class Stage:
    """An agent of node 1 in a thread, and the folder of its run."""

    def __init__(self, folder, monkeypatch):
        self.run, self.scripts, self.code = folder, {}, None
        monkeypatch.setattr(launch, "command", self.command)
        for module in (agent, supervisor):
            monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)
        # Only the main thread can handle signals.
        monkeypatch.setattr(children, "_STOP_SIGNALS", ())
        self.agent = self.thread = None
        self.listener, self.reported = nodes.Listener("127.0.0.1"), {}
        self.beat(self.listener)

    def command(self, run, control_file, node=0):
        script = self.scripts[control_file.attempt, node]
        return [sys.executable, "-c", HEAD.format(run=str(run)) + script]

    def config(self, **limits):
        supervision = SupervisionConfig(**{"node_wait_seconds": PATIENCE, **limits})
        return RunConfig(folder=str(self.run), supervision=supervision)

    def start(self, token="", **limits):
        self.agent = Agent(self.config(**limits), 1, token)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        self.code = self.agent.run()

    def start_attempt(self):
        """Start the agent, and an attempt that lasts until it is ended."""
        self.scripts[1, 1] = "time.sleep(60)"
        self.start()
        self.wait_for_state("", nodes.READY)
        control.write(self.run, ControlFile("a", 1, control.RUN, nodes=2))
        self.wait_for_state("a", nodes.RUNNING)

    def beat(self, listener):
        """As the supervisor does that holds its lock."""
        control.folder_of(self.run).mkdir(exist_ok=True)
        sign = {"host": socket.gethostname(), **listener.endpoint}
        files.replace_json(sign_of(self.run, SUPERVISOR_LOCK), sign)

    def supervisor(self, count=2, **limits):
        """The supervisor of an agent's run, which is node 0 of so many."""
        config, node = self.config(**limits), Node(0, count)
        return supervisor.Supervisor(config, node)

    def report(self):
        self.reported = [self.reported, *self.listener.accept()][-1]
        return self.reported

    def wait_for_state(self, token, state):
        wait_until(
            lambda: (self.report().get("token"), self.report().get("state")) == (token, state)
        )

    def join(self):
        self.thread.join(PATIENCE)
        return self.code


@pytest.fixture
def stage(tmp_path, monkeypatch):
    stage = Stage(tmp_path, monkeypatch)
    yield stage
    stage.listener.close()
    if stage.thread:
        control.write(tmp_path, ControlFile("end", 99, control.EXIT))
        stage.join()
    for node in (0, 1):
        processes.end_all(tmp_path, 0.0, node)


def test_an_agent_starts_and_ends_attempts_and_exits_with_the_code_of_the_control_file(stage):
    stage.start_attempt()
    wait_until(lambda: processes.members(stage.run, 1))
    control.write(stage.run, ControlFile("a", 1, control.STOP, nodes=2))
    stage.wait_for_state("a", nodes.READY)
    assert processes.members(stage.run, 1) == []
    control.write(stage.run, ControlFile("b", 0, control.EXIT, code=76))
    assert stage.join() == 76


def test_a_node_that_hears_nothing_ends_its_processes_even_while_it_waits_for_files(
    stage, monkeypatch
):
    stage.scripts[1, 1] = "time.sleep(60)"
    monkeypatch.setattr(nodes, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(nodes, "QUIET_SECONDS", 0.1)
    stage.start()
    stage.wait_for_state("", nodes.READY)
    back, read = threading.Event(), control.try_read
    monkeypatch.setattr(control, "try_read", lambda run: back.wait() and read(run))
    control.write(stage.run, ControlFile("a", 1, control.RUN, nodes=2))
    back.set()
    stage.wait_for_state("a", nodes.RUNNING)
    back.clear()
    wait_until(lambda: processes.members(stage.run, 1) == [])
    back.set()
    stage.wait_for_state("a", nodes.ENDED)
    assert stage.report()["problem"] == "it received no heartbeat from node 0 for 1 s"


def test_a_stopped_process_is_reported_of_its_own_attempt(stage):
    stage.scripts[1, 1] = "os.kill(os.getpid(), signal.SIGSTOP)"
    stage.start(hang_seconds=1.0)
    stage.wait_for_state("", nodes.READY)
    control.write(stage.run, ControlFile("a", 1, control.RUN, nodes=2))
    wait_until(lambda: "is stopped, as by SIGSTOP" in stage.report().get("problem", ""))
    assert stage.report()["state"] == nodes.RUNNING
    # Not of the next attempt, although it is long until the next search.
    stage.agent._stopped._seconds = PATIENCE
    stage.scripts[2, 1] = "time.sleep(60)"
    control.write(stage.run, ControlFile("b", 2, control.RUN, nodes=2))
    stage.wait_for_state("b", nodes.RUNNING)
    for _ in range(5):
        time.sleep(0.1)
        assert stage.report()["problem"] == ""


def test_an_attempt_with_more_ranks_than_gpus_is_reported(stage, monkeypatch):
    def refuse(*_):
        raise ValueError("supervision.processes_per_node: 4 ranks on a machine with 2 usable GPUs")

    stage.start()
    stage.wait_for_state("", nodes.READY)
    monkeypatch.setattr(launch, "command", refuse)
    control.write(stage.run, ControlFile("a", 1, control.RUN, nodes=2, processes_per_node=4))
    stage.wait_for_state("a", nodes.ENDED)
    reason = "supervision.processes_per_node: 4 ranks on a machine with 2 usable GPUs"
    assert stage.report()["problem"] == f"it could not be started: {reason}"


@pytest.mark.parametrize("start", ["", "s1"])
def test_an_attempt_of_an_old_control_file_is_not_started(stage, start):
    """It may be days old, or this node has lost its part of it."""
    control.write(stage.run, ControlFile("old", 1, control.RUN, nodes=2, start=start))
    stage.start(start)
    stage.wait_for_state("old", nodes.ENDED)
    assert stage.report()["problem"] == "its agent was restarted"
    assert processes.members(stage.run, 1) == []


def test_a_request_to_stop_is_forwarded_and_a_second_one_ends_the_attempt(stage):
    stage.start_attempt()
    stage.agent._stop_requests.count = 1
    wait_until(lambda: control.stop_requested(stage.run, "a"))
    stage.agent._stop_requests.count = 2
    assert stage.join() == EXIT_PREEMPTED
    assert processes.members(stage.run, 1) == []
    assert (stage.report()["token"], stage.report()["state"]) == ("a", nodes.ENDED)


@pytest.mark.parametrize(
    ("order", "code"), [(control.STOP, EXIT_PREEMPTED), *slow((control.EXIT, 0))]
)
def test_after_a_request_to_stop_the_supervisor_says_how_the_run_ended(stage, order, code):
    """In the last steps a request has no effect; if no supervisor is left, the agent goes."""
    stage.start_attempt()
    stage.agent._stop_requests.count = 1
    control.write(stage.run, ControlFile("a", 1, control.STOP, nodes=2))
    stage.wait_for_state("a", nodes.READY)
    if order == control.EXIT:
        control.write(stage.run, ControlFile("b", 0, control.EXIT, code=0))
    assert stage.join() == code


def test_an_agent_of_a_finished_run_leaves_at_once_unless_the_run_goes_on(stage):
    ledger.append(stage.run / ledger.FILE_NAME, "done", step=RunConfig().training.steps)
    stage.start()
    assert stage.join() == EXIT_DONE
    config = stage.config(node_wait_seconds=0.5)
    assert Agent(config, 1).run(goes_on=True) == EXIT_FAILED  # no supervisor came
    ledger.append(
        stage.run / ledger.FILE_NAME, "commit", step=1, manifest="of a damaged checkpoint"
    )
    assert Agent(config, 1).run() == EXIT_FAILED


def test_a_file_system_that_is_unavailable_for_a_while_does_not_end_an_agent(stage, monkeypatch):
    """Its attempt continues, and a request to stop is still forwarded."""
    stage.start_attempt()
    monkeypatch.setattr(files, "_PAUSES", ())

    def unavailable(self, *_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))

    with monkeypatch.context() as patch:
        for name in ("read_bytes", "write_text"):
            patch.setattr(Path, name, unavailable)
        stage.agent._stop_requests.count = 1
        wait_until(lambda: control.stop_requested(stage.run, "a"))
        assert stage.thread.is_alive()
    stage.wait_for_state("a", nodes.RUNNING)
    control.write(stage.run, ControlFile("b", 0, control.EXIT, code=0))
    assert stage.join() == 0


def test_an_agent_without_a_supervisor_exits_and_one_whose_supervisor_waits_does_not(
    stage, monkeypatch
):
    """The supervisor may wait for room on the disk, for days."""
    monkeypatch.setattr(folder, "_SIGN_SECONDS", 0.1)
    with folder.lock(stage.run, SUPERVISOR_LOCK):
        stage.start(node_wait_seconds=0.5)
        stage.thread.join(2.0)
        assert stage.code is None
    assert stage.join() == EXIT_FAILED


def test_an_agent_whose_supervisor_left_while_it_started_leaves_as_well(stage):
    control.write(stage.run, ControlFile("old", 0, control.EXIT, code=76, start="s1"))
    stage.start("s1")
    assert stage.join() == 76


@pytest.mark.parametrize("state", [control.STOP, control.RUN])
def test_an_agent_of_an_earlier_start_leaves_and_starts_nothing(stage, state):
    """The new supervisor may run on another machine, and its agents elsewhere than the old ones."""
    control.write(stage.run, ControlFile("old", 0, control.EXIT, start="s0"))
    stage.start("s1")
    stage.wait_for_state("old", nodes.ENDED)
    assert stage.report()["start"] == "s1"
    control.write(stage.run, ControlFile("a", 1, state, nodes=2, start="s2"))
    assert stage.join() == EXIT_DONE
    assert processes.members(stage.run, 1) == []
    Agent(stage.config(), 1, "s2")._lock.close()


@pytest.mark.parametrize("state", ["", control.EXIT])
def test_a_supervisor_ends_agents_of_an_earlier_start_before_its_first_attempt(stage, state):
    if state:
        control.write(stage.run, ControlFile("old", 0, state, start="s0"))
    stage.start("s1")
    wait_until(lambda: stage.report().get("start") == "s1")
    supervisor = stage.supervisor(hostfile="hosts")
    with supervisor._lock:
        assert supervisor._take_over() is None
        assert stage.join() == EXIT_DONE


def test_an_agent_that_cannot_connect_to_node_0_says_so_and_tries_again(stage, monkeypatch, capsys):
    monkeypatch.setattr(nodes, "QUIET_SECONDS", 0.1)
    stage.listener.close()
    stage.start("s1")
    said, port = [], stage.listener.endpoint["port"]
    wait_until(lambda: said.append(capsys.readouterr().out) or "\n" in "".join(said))
    time.sleep(0.3)
    said.append(capsys.readouterr().out)
    refused = f"cannot connect to node 0, port {port} of 127.0.0.1: Connection refused"
    assert "".join(said) == f"[node 1] {refused}\n"
    stage.listener = nodes.Listener("127.0.0.1")
    stage.beat(stage.listener)
    stage.wait_for_state("", nodes.READY)


def test_a_node_has_only_one_agent(stage):
    stage.start()
    with pytest.raises(ValueError, match=r"node 1 has an agent already"):
        Agent(stage.config(), 1)


def test_a_supervisor_waits_for_the_agents_ends_attempts_on_all_nodes_and_releases_them(stage):
    stage.scripts = {
        (1, 0): "record('attempt'); time.sleep(60)",
        (1, 1): "time.sleep(0.3); raise SystemExit(9)",
        (2, 0): "record('attempt'); record('done')",
        (2, 1): "time.sleep(60)",
    }
    supervisor = stage.supervisor()
    threading.Timer(0.5, stage.start).start()
    assert supervisor.run() == 0
    assert stage.join() == 0
    records = ledger.read_ledger(stage.run / "ledger.jsonl")
    assert [record["kind"] for record in records] == ["attempt", "crash", "attempt", "done"]
    reason = f"node 1 ({socket.gethostname()}): its launcher ended with code 9"
    assert records[1]["reason"] == reason
    assert processes.members(stage.run, 1) == []


def test_a_ledger_that_does_not_verify_ends_the_agents_as_well(stage):
    damage = "(run / 'ledger.jsonl').open('a').write('damage' + chr(10)); time.sleep(60)"
    stage.scripts = {(1, 0): f"record('attempt'); {damage}", (1, 1): "time.sleep(60)"}
    stage.start()
    with pytest.raises(ValueError, match="line 2 does not follow"):
        stage.supervisor().run()
    assert stage.join() == EXIT_USAGE


def test_a_new_supervisor_makes_the_agents_end_the_last_attempt(stage):
    stage.scripts = {(2, 0): "record('attempt'); record('done')", (2, 1): "time.sleep(60)"}
    stage.start_attempt()
    ledger.append(stage.run / "ledger.jsonl", "attempt", token="a", attempt=1, step=0)
    supervisor = stage.supervisor()
    assert supervisor.run() == 0
    kinds = [record["kind"] for record in ledger.read_ledger(stage.run / "ledger.jsonl")]
    assert kinds == ["attempt", "crash", "attempt", "done"]


def test_a_supervisor_gives_up_if_a_node_does_not_come(stage):
    assert stage.supervisor(3, node_wait_seconds=0.3).run() == EXIT_FAILED
    (record,) = ledger.read_ledger(stage.run / "ledger.jsonl")
    assert "node 1, 2 did not connect to port" in record["reason"]


def test_a_node_that_is_refused_ends_the_run_at_once_and_leaves(stage):
    supervisor, begun = stage.supervisor(), time.monotonic()
    refused = stage.config(), 1, "no such corpus"
    node = threading.Thread(target=agent.tell_refusal, args=refused, daemon=True)
    node.start()
    assert supervisor.run() == EXIT_FAILED
    node.join(PATIENCE)
    assert time.monotonic() < begun + PATIENCE / 2
    (record,) = ledger.read_ledger(stage.run / "ledger.jsonl")
    assert record["reason"] == f"node 1 ({socket.gethostname()}) is refused: no such corpus"


def test_a_supervisor_can_be_stopped_while_it_waits_for_nodes(stage):
    supervisor = stage.supervisor()
    sign = control.read_json(sign_of(stage.run, SUPERVISOR_LOCK))
    socket.create_connection((sign["address"], sign["port"])).close()
    supervisor._stop_requests.count = 1
    assert supervisor.run() == EXIT_PREEMPTED
    found = control.read_control_file(stage.run)
    assert found == ControlFile(
        found.token, 0, control.EXIT, code=EXIT_PREEMPTED, start=supervisor._agents.start
    )
    stage.supervisor()._take_over()
    assert control.read_control_file(stage.run) == found, "an agent may not have read it yet"


def test_a_node_that_dies_while_the_disk_has_no_room_is_waited_for(stage, monkeypatch):
    supervisor, said = stage.supervisor(node_wait_seconds=0.3), []
    Reporter(stage.run, 1).send(Report("", nodes.READY))
    monkeypatch.setattr(nodes, "SILENCE_SECONDS", 3 * nodes.QUIET_SECONDS + 0.1)
    monkeypatch.setattr(supervisor, "_print", said.append)

    def lack():
        silent = supervisor._other_nodes.unavailable()
        return "" if said and silent else "no room"

    monkeypatch.setattr(supervisor, "_lack_of_room", lack)
    assert supervisor.run() == EXIT_FAILED
    (gave_up,) = ledger.read_ledger(stage.run / "ledger.jsonl")
    assert "node 1" in gave_up["reason"]


def test_an_end_is_recorded_though_another_node_does_not_report_its_own(stage, monkeypatch):
    """Its agent may have been killed; Slurm would kill this supervisor 30 s later."""
    stage.scripts = {(1, 0): "record('attempt'); time.sleep(3); raise SystemExit(9)"}
    monkeypatch.setattr(nodes, "SILENCE_SECONDS", 600.0)
    supervisor = stage.supervisor(node_wait_seconds=1.0)
    reporter = Reporter(stage.run, 1)
    reporter.send(Report("", nodes.READY))
    launched = threading.Timer(1.0, reporter.send, [Report("", nodes.RUNNING)])
    launched.start()
    started = time.monotonic()
    assert supervisor.run() == EXIT_FAILED
    launched.join()
    assert time.monotonic() - started < PATIENCE
    records = ledger.read_ledger(stage.run / "ledger.jsonl")
    assert [record["kind"] for record in records] == ["attempt", "crash", "gave-up"]
