"""Which node this is, and what node 0 knows of the others."""

import contextlib
import errno
import socket
import time

import pytest

from data_prep.common import files
from pretrain.records import control, folder
from pretrain.records.heartbeat import Heartbeat
from pretrain.supervision import nodes
from pretrain.supervision.decide import CRASH, HANG, Problem
from pretrain.supervision.nodes import (
    ENDED,
    QUIET_SECONDS,
    READY,
    REFUSED,
    RUNNING,
    SILENCE_SECONDS,
    Listener,
    Node,
    OtherNodes,
    Report,
    Reporter,
    SupervisorLiveness,
    this_node,
)
from tests.pretrain.builders import failing

HOST = socket.gethostname()
SLURM = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}


def test_a_node_is_the_only_one_unless_the_user_or_slurm_says_otherwise():
    assert this_node(None, None, None, {}) == Node()
    assert this_node(1, 3, "10.0.0.1", {}) == Node(1, 3, "10.0.0.1")
    under_srun = this_node(None, None, None, {**SLURM, "SLURMD_NODENAME": "gpu7"})
    assert under_srun == Node(1, 2, "gpu7")
    assert this_node(0, None, "localhost", SLURM) == Node(0, 2, "localhost")
    # A batch script, or a step with many tasks on a node: these are not agents.
    assert this_node(None, None, None, {"SLURM_NODEID": "1"}) == Node()
    assert this_node(None, None, None, {**SLURM, "SLURM_STEP_NUM_TASKS": "16"}) == Node()
    with pytest.raises(ValueError, match="must be 0 or above, and below --nodes 0"):
        this_node(None, 0, None, {})


@pytest.mark.parametrize("address", ["x..y", "a" * 64])
def test_an_address_that_node_0_does_not_know_is_refused(address):
    assert this_node(1, 2, address, {}).rank == 1  # it does not use it
    with pytest.raises(ValueError, match=f"--master-addr: '?{address}'? is not accepted"):
        this_node(0, 2, address, {})


def send(run, node, report):
    """As an agent that has just begun to report."""
    Reporter(run, node).send(report)


@pytest.fixture
def listener(tmp_path):
    with contextlib.closing(Listener("127.0.0.1")) as listener:
        control.folder_of(tmp_path).mkdir()
        sign = {"host": HOST, **listener.endpoint}
        files.replace_json(folder.sign_of(tmp_path, folder.SUPERVISOR_LOCK), sign)
        yield listener


@pytest.fixture
def others(listener, now):
    return OtherNodes(3, "", listener)


def problem(others, token):
    """As the supervisor sees it after it has read the reports."""
    others.read()
    return others.problem(token)


def pass_(now, others, seconds):
    """Let time pass with a read every QUIET_SECONDS."""
    for _ in range(round(seconds / QUIET_SECONDS)):
        now[0] += QUIET_SECONDS
        others.read()


def test_a_node_is_available_that_reports_to_this_start_and_runs_nothing(tmp_path, listener):
    others = OtherNodes(5, "s2", listener)
    assert others.unavailable() == [1, 2, 3, 4]
    for node, start in ((1, "s1"), (2, "s2"), (3, "")):
        send(tmp_path, node, Report("", READY, start=start))
    send(tmp_path, 4, Report("t", RUNNING, start="s2"))
    assert others.unavailable() == [1, 4]
    assert others.busy() == [4]


def test_a_node_whose_agent_is_being_replaced_is_available_with_the_next_one(tmp_path, others):
    before, after = Reporter(tmp_path, 1), Reporter(tmp_path, 1)
    others.replace(1)  # the first one replaces none
    before.send(Report("", READY))
    assert others.unavailable() == [2]
    others.replace(1)
    before.send(Report("t", ENDED, "its launcher ended"))  # its network is back
    assert others.unavailable() == [1, 2]
    after.send(Report("", READY))
    assert others.unavailable() == [2]


def test_a_node_that_is_refused_is_not_available_and_says_why(tmp_path, others):
    send(tmp_path, 1, Report("t", ENDED, "its launcher ended"))
    send(tmp_path, 2, Report("", REFUSED, "has no corpus"))
    assert others.unavailable() == [2]
    assert others.refusals() == f"node 2 ({HOST}) has no corpus"
    assert problem(others, "another") is None


def test_a_silent_node_and_one_whose_launcher_ended_are_problems(tmp_path, now, others):
    for node in (1, 2):
        send(tmp_path, node, Report("t", RUNNING))
    assert problem(others, "t") is None
    pass_(now, others, 42)
    send(tmp_path, 1, Report("t", RUNNING))
    assert problem(others, "t") is None
    now[0] += 1
    assert problem(others, "t") == Problem(CRASH, f"node 2 ({HOST}) was silent for 60 s")
    assert others.busy() == [1]
    send(tmp_path, 1, Report("t", ENDED, "its launcher ended with code 9"))
    send(tmp_path, 2, Report("t", RUNNING))
    assert problem(others, "t") == Problem(
        CRASH, f"node 1 ({HOST}): its launcher ended with code 9"
    )
    assert problem(others, "another") is None


def test_a_report_is_renewed_when_it_changes_and_as_a_sign_of_life(tmp_path, now, others, listener):
    reporter = Reporter(tmp_path, 1)
    send(tmp_path, 2, Report("t", RUNNING))
    for _ in range(9):
        reporter.send(Report("t", RUNNING))
        others.read()
        assert 1 not in others.silent()
        reporter.send(Report("t", RUNNING))
        assert listener.accept() == []
        pass_(now, others, 30)
    assert others.silent() == [2]
    reporter.send(Report("t", RUNNING))
    reporter.send(Report("t", READY))
    assert others.busy() == []


def test_a_node_that_dies_is_noticed_within_the_limit_and_one_that_lives_is_not_silent(
    tmp_path, now, listener
):
    """Both sides act every QUIET_SECONDS, and may be a second late."""
    others = OtherNodes(2, "", listener)
    reporter, late = Reporter(tmp_path, 1), QUIET_SECONDS + 1.0
    for _ in range(3):
        reporter.send(Report("t", RUNNING))
        now[0] += late - 0.1  # the sign came right after a look
        others.read()
        assert others.silent() == []
        now[0] += 2 * late
        others.read()
        assert others.silent() == []
    reporter.send(Report("t", RUNNING))
    died = now[0]
    while not others.silent():
        now[0] += late
        others.read()
    assert SILENCE_SECONDS / 2 < now[0] - died <= SILENCE_SECONDS


def test_a_reader_that_waited_does_not_take_its_wait_for_silence(tmp_path, now, others):
    for node in (1, 2):
        send(tmp_path, node, Report("t", RUNNING))
    others.read()
    for _ in range(2):  # the others were kept as well, and have not reported yet
        now[0] += 100
        assert others.silent() == []
        assert problem(others, "t") is None
    pass_(now, others, 30)
    assert others.silent() == [1, 2]


def test_a_stopped_process_on_another_node_is_a_hang_of_that_attempt_only(tmp_path, others):
    send(tmp_path, 1, Report("t", RUNNING))
    assert problem(others, "t") is None
    stopped = "rank 3 (pid 9) is stopped"
    send(tmp_path, 1, Report("t", RUNNING, stopped))
    assert problem(others, "t") == Problem(HANG, f"node 1 ({HOST}): {stopped}")
    assert problem(others, "another") is None
    assert others.busy() == [1]


def test_a_new_supervisor_gives_the_other_nodes_time_to_report(tmp_path, now, others):
    assert problem(others, "t") is None
    pass_(now, others, 60)
    assert problem(others, "t") == Problem(CRASH, "node 1, 2 was silent for 60 s")
    assert problem(OtherNodes(1, "", None), "t") is None
    pass_(now, many := OtherNodes(1024, "", None), 60)
    assert problem(many, "t").reason.endswith("7, 8 and 1,015 more was silent for 60 s")


def test_a_node_hears_the_supervisor_or_rank_0_and_notices_their_silence(
    tmp_path, now, monkeypatch
):
    monkeypatch.setattr(nodes, "MAX_PAUSE", 70.0)
    liveness = SupervisorLiveness(tmp_path)
    beat, renew = Heartbeat(tmp_path, "t"), []
    monkeypatch.setattr(
        control, "repeated", lambda _, act: renew.append(act) or contextlib.nullcontext()
    )
    held = folder.lock(tmp_path, folder.SUPERVISOR_LOCK)

    def renew_on_a_full_disk():
        time.sleep(0.02)  # the clock of files is coarse
        with monkeypatch.context() as disk:
            disk.setattr(files, "replace_json", failing(files.replace_json, [errno.ENOSPC]))
            renew[0]()

    full = [renew_on_a_full_disk] * 2
    for sign in (lambda: renew[0](), *full, lambda: beat.beat("step", 1), lambda: None):
        assert liveness.silence() == ""
        now[0] += 50
        sign()
        liveness.listen()
    now[0] += 11
    liveness.listen()
    assert liveness.silence() == "it received no heartbeat from node 0 for 60 s"
    renew[0]()
    assert liveness.silence() != ""  # it has to listen
    liveness.listen()
    assert liveness.silence() == ""
    now[0] += 500  # this process was stopped meanwhile, as with a suspended job
    assert liveness.silence() == ""
    held.close()


def test_only_reports_with_the_key_of_the_folder_count(tmp_path, others, listener):
    path = folder.sign_of(tmp_path, folder.SUPERVISOR_LOCK)
    for key, heard in (("another", [1, 2]), (listener.endpoint["key"], [1])):
        files.replace_json(path, {**listener.endpoint, "key": key})
        send(tmp_path, 2, Report("", READY))
        address = listener.endpoint["address"], listener.endpoint["port"]
        silent, stranger = (socket.create_connection(address) for _ in range(2))
        with silent, stranger:
            stranger.sendall(b"[" * 60_000)
            assert others.unavailable() == heard


def test_a_report_that_cannot_be_sent_is_said_once_and_one_without_a_supervisor_is_none(
    tmp_path, now, listener
):
    reporter = Reporter(tmp_path, 2)
    listener.close()
    refused = f"cannot connect to node 0, port {listener.endpoint['port']} of 127.0.0.1: "
    said = []
    for _ in range(2):
        said.append(reporter.send(Report("", READY)))
        now[0] += QUIET_SECONDS
    assert said == [f"{refused}Connection refused", ""]
    with folder.lock(tmp_path, folder.SUPERVISOR_LOCK):  # of a supervisor without other nodes
        assert reporter.send(Report("", READY)) == ""
    now[0] += QUIET_SECONDS
    assert reporter.send(Report("", READY)) == ""
