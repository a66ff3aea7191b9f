"""Control files of supervisor, ranks and agents."""

import errno
import os
import signal
import threading
from pathlib import Path

import pytest

from data_prep.common import children
from pretrain.records import control
from pretrain.records.control import ControlFile
from tests.pretrain.builders import failing

CONTROL_FILE = ControlFile(
    "aa", 3, control.RUN, nodes=2, processes_per_node=4, address="10.0.0.1", port=999
)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in children._STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_control_file_that_was_written_last_is_read(tmp_path):
    assert control.read_control_file(tmp_path) is None
    for written in (ControlFile("zz", 1, control.RUN), CONTROL_FILE):
        control.write(tmp_path, written)
        assert control.read_control_file(tmp_path) == written


def test_what_killed_processes_had_not_finished_writing_is_deleted(tmp_path):
    control.write(tmp_path, CONTROL_FILE)
    written = {*control.folder_of(tmp_path).iterdir()}
    for name in (".control.json.8e72.partial", ".heartbeat.json.17"):
        (control.folder_of(tmp_path) / name).touch()
    control.write(tmp_path, CONTROL_FILE)
    assert {*control.folder_of(tmp_path).iterdir()} == written


def test_a_file_with_other_fields_is_refused_by_name(tmp_path):
    control.write(tmp_path, CONTROL_FILE)
    path = control.folder_of(tmp_path) / "control.json"
    path.write_text('{"what": 1}')
    with pytest.raises(ValueError, match=r"control.json: is not a control file .*delete it"):
        control.read_control_file(tmp_path)


def test_an_attempt_is_superseded_by_another_one_and_by_its_own_end(tmp_path):
    assert not control.superseded(tmp_path, "aa")
    control.write(tmp_path, CONTROL_FILE)
    assert not control.superseded(tmp_path, "aa")
    control.check_not_superseded(tmp_path, "aa")
    assert control.superseded(tmp_path, "bb")
    # An attempt without a supervisor; locks keep it apart from others.
    assert not control.superseded(tmp_path, "")
    with pytest.raises(ValueError, match=r"was superseded .*attempt 3"):
        control.check_not_superseded(tmp_path, "bb")
    control.write(tmp_path, ControlFile("aa", 3, control.STOP))
    assert control.superseded(tmp_path, "aa")


def test_a_request_to_stop_is_for_one_attempt_and_is_deleted_with_the_next(tmp_path):
    control.request_stop(tmp_path, "aa")
    assert control.stop_requested(tmp_path, "aa")
    assert not control.stop_requested(tmp_path, "bb")
    control.write(tmp_path, CONTROL_FILE)
    assert control.stop_requested(tmp_path, "aa")
    control.write(tmp_path, ControlFile("bb", 4, control.RUN))
    assert not control.stop_requested(tmp_path, "aa")


def test_stop_signals_are_counted_inside_the_block_only(now):
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    requests = control.StopRequests()
    with requests.counted():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(os.getpid(), number)
            now[0] += 10
        assert requests.count == 2
        now[0] += 10
        for number in (signal.SIGTERM, signal.SIGUSR1):  # as Slurm and the job's script send them
            os.kill(os.getpid(), number)
            now[0] += 1
        assert requests.count == 3
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(
    ("environ", "on_sigterm"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "CROSS_RANK": "0"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "x"}, False),
    ],
)
def test_a_rank_requests_a_stop_on_sigusr1_and_directly_under_srun_on_sigterm(
    tmp_path, environ, on_sigterm
):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control.stop_on_signals(tmp_path, "aa", environ)
    os.kill(os.getpid(), signal.SIGTERM)
    assert control.stop_requested(tmp_path, "aa") == on_sigterm
    os.kill(os.getpid(), signal.SIGUSR1)
    assert control.stop_requested(tmp_path, "aa")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EAGAIN])
def test_a_control_file_that_cannot_be_read_for_a_moment_is_read_again(
    tmp_path, monkeypatch, no_waiting, number
):
    control.write(tmp_path, CONTROL_FILE)
    monkeypatch.setattr(Path, "read_bytes", failing(Path.read_bytes, [number] * 3))
    assert control.read_control_file(tmp_path) == CONTROL_FILE


def test_an_unreadable_control_file_supersedes_no_attempt_and_is_not_taken_for_a_missing_one(
    tmp_path, monkeypatch, no_waiting
):
    control.write(tmp_path, ControlFile("bb", 4, control.RUN))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing(Path.read_bytes, [errno.ESTALE] * 100))
        assert not control.superseded(tmp_path, "aa")
        control.check_not_superseded(tmp_path, "aa")
        with pytest.raises(OSError, match="control.json"):
            control.read_control_file(tmp_path)
    assert control.superseded(tmp_path, "aa")


def test_a_request_that_the_disk_refuses_is_not_a_request_and_ends_nothing(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", fails)
        patch.setattr(os, "stat", fails)
        control.stop_on_signals(tmp_path, "aa", {})
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not control.stop_requested(tmp_path, "aa")


def test_what_is_repeated_goes_on_after_errors_and_prints_each_once(capsys):
    errors, gone_on = iter([KeyError("a"), KeyError("a"), ValueError("b")]), threading.Event()

    def action():
        if error := next(errors, None):
            raise error
        gone_on.set()

    with control.repeated(0.01, action):
        assert gone_on.wait(10)
    printed = capsys.readouterr().err
    assert (printed.count("KeyError: 'a'"), printed.count("ValueError: b")) == (1, 1)
