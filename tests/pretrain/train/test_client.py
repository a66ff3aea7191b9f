"""What a rank reports to its supervisor, and what stops it."""

import os
import signal

import pytest

from data_prep.common.exit_codes import EXIT_FAILED, EXIT_PREEMPTED
from pretrain.loop.protocols import GO_ON
from pretrain.records import control, heartbeat
from pretrain.records.control import ControlFile
from pretrain.train.client import SupervisorClient
from tests.pretrain.builders import step_record


@pytest.fixture(autouse=True)
def _handler():
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def stage(run):
    return heartbeat.read_heartbeat(run, "t").stage


def test_hooks_are_stages_of_their_own_and_steps_the_rest(tmp_path):
    client = SupervisorClient(tmp_path, "t", 0, last_step=10)
    assert stage(tmp_path) == "init"
    with client.stage("save", 4):
        assert stage(tmp_path) == "save"
    assert stage(tmp_path) == "step"


def test_other_ranks_say_nothing_and_do_their_work(tmp_path):
    client, seen = SupervisorClient(tmp_path, "t", 1, last_step=10), []
    with client.stage("save", 4):
        seen.append(4)
    assert seen == [4]
    assert heartbeat.read_heartbeat(tmp_path, "t") == heartbeat.NO_BEAT


def test_a_request_ends_the_attempt_after_the_step_but_not_after_the_last(tmp_path):
    client = SupervisorClient(tmp_path, "t", 0, last_step=10)
    assert client.verdict(step_record(2)) == GO_ON
    os.kill(os.getpid(), signal.SIGUSR1)
    assert client.verdict(step_record(9)) == GO_ON
    assert client.verdict(step_record(3)) == EXIT_PREEMPTED
    assert client.stopped_after == 4
    assert SupervisorClient(tmp_path, "another", 0, last_step=10).verdict(step_record(3)) == GO_ON


def test_an_attempt_that_was_superseded_ends_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(control.TOKEN_VARIABLE, "t")
    control.write(tmp_path, ControlFile("t", 1, control.RUN))
    assert SupervisorClient(tmp_path, "t", 0, last_step=10).verdict(step_record(0)) == GO_ON
    control.write(tmp_path, ControlFile("u", 2, control.RUN))
    assert SupervisorClient(tmp_path, "t", 0, last_step=10).verdict(step_record(0)) == EXIT_FAILED
    assert "a newer attempt was started" in capsys.readouterr().err
