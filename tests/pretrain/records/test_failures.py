"""The errors of an attempt's ranks, and which of them is the cause."""

import dataclasses
import errno
import json
import os

import pytest
from torch.distributed import DistBackendError

from data_prep.common import files
from pretrain.records import audit, control, failures
from pretrain.records.control import ControlFile
from pretrain.records.failures import RankError
from tests.pretrain.builders import failing

HOSTS = ["gpu-0", "gpu-1", "gpu-1"]
CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]"


def error(rank, time, message="ValueError: no", is_secondary=False, **fields):
    return RankError(rank, f"gpu-{rank}", time, 1, message, is_secondary, **fields)


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Report the error that an action raises, as rank 3 of the attempt with token "t"."""
    monkeypatch.setenv(control.TOKEN_VARIABLE, "t")
    monkeypatch.setenv("RANK", "3")
    control.write(tmp_path, ControlFile("t", 1, control.RUN))

    def work(action, **keywords):
        try:
            action()
        except Exception as error:
            failures.report(tmp_path, 1, error, **keywords)
        return failures.read_failures(tmp_path, "t")

    return work


def fail(error):
    raise error


def test_a_rank_s_error_is_read_with_its_location_in_our_code(report, tmp_path):
    (found,) = report(lambda: audit.audit(tmp_path / "none"), unexpected=True)
    assert (found.rank, found.code, found.is_secondary) == (3, 1, False)
    assert found.message.startswith("ValueError: ")
    assert "(pretrain/records/audit.py, line " in found.message
    assert found.traceback.splitlines()[-1].startswith("ValueError: ")


def test_a_refusal_has_a_message_and_no_traceback(report):
    """Also of a path whose bytes are not UTF-8."""
    (found,) = report(lambda: fail(ValueError("b\udcfcch.yaml: 'huge'\nis unknown")))
    assert (found.message, found.traceback) == ("b\udcfcch.yaml: 'huge' is unknown", "")


@pytest.mark.parametrize("refusals", [3, 10**6])
def test_a_disk_that_ended_a_rank_is_told_of_that_when_it_is_back(report, monkeypatch, refusals):
    refuses = failing(files.replace_json, [errno.EROFS] * refusals)
    monkeypatch.setattr(files, "replace_json", refuses)
    monkeypatch.setattr(failures, "_WRITE_SECONDS", 0.2)
    assert len(report(lambda: fail(OSError(errno.EROFS, "metrics")))) == (refusals == 3)


@pytest.mark.parametrize(
    ("raised", "is_secondary"),
    [
        (RuntimeError(CLOSED), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (DistBackendError("x"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (ValueError("connection closed"), False),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("gloo: the server socket cannot listen: EADDRINUSE"), False),
    ],
)
def test_a_lost_connection_follows_from_another_rank_s_end(report, raised, is_secondary):
    (found,) = report(lambda: fail(raised), unexpected=True)
    assert found.is_secondary is is_secondary


def test_nothing_is_written_without_a_supervisor_or_after_the_attempt_was_stopped(
    report, tmp_path, monkeypatch
):
    control.write(tmp_path, ControlFile("t", 1, control.STOP))
    assert report(lambda: fail(RuntimeError(CLOSED))) == []
    control.write(tmp_path, ControlFile("t", 1, control.RUN))
    monkeypatch.delenv(control.TOKEN_VARIABLE)
    assert report(lambda: fail(ValueError("no"))) == []
    assert [path.name for path in control.folder_of(tmp_path).iterdir()] == ["control.json"]


def test_a_file_that_cannot_be_read_is_skipped(report, tmp_path):
    (path,) = [control.folder_of(tmp_path) / "failure-t-1.json"]
    path.write_text('{"rank": 1')
    assert len(report(lambda: fail(ValueError("no")))) == 1
    path.write_text(json.dumps({"rank": 1, "of": "another version"}))
    assert len(failures.read_failures(tmp_path, "t")) == 1


def test_errors_come_in_the_order_of_their_files_as_clocks_of_hosts_differ(tmp_path):
    for rank, written in ((0, 20.0), (1, 10.0)):
        path = control.folder_of(tmp_path) / f"failure-t-{rank}.json"
        files.replace_json(path, dataclasses.asdict(error(rank, 100.0 * rank)))
        os.utime(path, (written, written))
    assert [e.rank for e in failures.read_failures(tmp_path, "t")] == [1, 0]


def test_a_new_attempt_deletes_the_errors_of_earlier_ones(report, tmp_path):
    report(lambda: fail(ValueError("no")))
    control.write(tmp_path, ControlFile("t", 1, control.STOP))
    assert len(failures.read_failures(tmp_path, "t")) == 1
    control.write(tmp_path, ControlFile("u", 2, control.RUN))
    assert failures.read_failures(tmp_path, "t") == []


def test_the_cause_is_the_first_error_that_no_other_rank_s_end_explains():
    lost, own, late = error(0, 10.0, CLOSED, True), error(1, 10.5), error(2, 10.6, "late")
    assert failures.cause([lost, own, late]) is own
    assert failures.cause([own, lost]) is own
    assert failures.cause([lost]) is None
    assert failures.cause([]) is None
    assert failures.cause([lost, dataclasses.replace(own, time=100.0)]) is None


def test_ranks_with_the_same_message_are_named_together():
    same, other = [error(1, 1.0), error(0, 2.0)], error(2, 0.5, "other")
    expected = "rank 0, 1 on gpu-0, gpu-1: ValueError: no"
    assert failures.explain([*same, dataclasses.replace(other, time=3.0)], HOSTS) == expected
    assert failures.explain([other, *same], HOSTS) == "rank 2 on gpu-2: other"
    many = [error(rank, 1.0) for rank in range(1024)]
    assert failures.explain(many).startswith(
        "rank 0, 1, 2, 3, 4, 5, 6, 7 and 1,016 more on gpu-0, "
    )


def test_a_rank_without_a_message_is_named_if_others_lost_their_connection():
    lost = error(0, 1.0, CLOSED, True)
    assert failures.explain([lost], HOSTS) == "rank 1, 2 on gpu-1 ended without a message"
    assert failures.explain([lost], ["one"] * 3) == "rank 1, 2 ended without a message"
    assert failures.explain([lost, error(1, 1.1)], HOSTS) == "rank 1 on gpu-1: ValueError: no"
    assert failures.explain([], HOSTS) == ""
    assert failures.explain([lost], HOSTS[:1]) == f"rank 0 on gpu-0: {CLOSED}"
    assert failures.explain([lost]) == f"rank 0 on gpu-0: {CLOSED}"
