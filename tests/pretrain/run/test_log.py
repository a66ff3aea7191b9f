"""What rank 0 writes and says, on a disk that is full for a while."""

import errno
import os
import sys

import pytest

from pretrain.config.run import RunConfig
from pretrain.run import ledger
from pretrain.run.folder import Start
from pretrain.run.log import RunLog


@pytest.fixture
def log(tmp_path):
    path = tmp_path / ledger.FILE_NAME
    ledger.append(path, "attempt", attempt=1, token="t", step=0, pid=1, host="here")
    state = ledger.fold(ledger.read(path), 1)
    return RunLog(RunConfig(folder=str(tmp_path)), Start(1, "t", 0, state))


def kinds(folder):
    return [record["kind"] for record in ledger.read(folder / ledger.FILE_NAME)]


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_the_ledger_cannot_take_now_is_told_later_and_in_order(log, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        log.note("save-failed", step=10, reason="full")
        log.note("suspect", step=12)
        with pytest.raises(OSError, match=r"No space left on device: .*ledger.jsonl"):
            log.record("commit", step=20)
    assert kinds(tmp_path) == ["attempt"]
    log.record("commit", step=30)
    assert kinds(tmp_path) == ["attempt", "save-failed", "suspect", "commit"]
    assert ledger.read(tmp_path / ledger.FILE_NAME)[1]["step"] == 10


def test_an_attempt_that_is_over_notes_nothing(log, tmp_path):
    path = tmp_path / ledger.FILE_NAME
    ledger.append(path, "attempt", attempt=2, token="u", step=0, pid=2, host="there")
    with pytest.raises(ValueError, match="attempt 2"):
        log.note("suspect", step=12)
    assert kinds(tmp_path) == ["attempt", "attempt"]


def test_what_the_console_cannot_take_now_is_said_later(log, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", full)
        log.say("one")
        log.warn_once("two")
        log.warn_once("two")
    assert capsys.readouterr().out == ""
    log.say("three")
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
