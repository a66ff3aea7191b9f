"""The lock and the creation of a run, and what its attempts refuse."""

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep import cache, contents
from data_prep.common import files
from pretrain.checks import recipe as recipe_checks
from pretrain.checks.resume import check_run
from pretrain.records import folder as run_folder
from pretrain.records import ledger, segments
from pretrain.train import setup


def test_a_run_is_locked_for_as_long_as_the_file_is_open(tmp_path):
    run = tmp_path / "a" / "run"
    held = run_folder.lock(run)
    holder = rf"process {os.getpid()} on {socket.gethostname()}"
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"run: is being trained by .* \({holder}\)"):
            run_folder.lock(run)
    held.close()
    run_folder.lock(run).close()
    run_folder.lock(tmp_path / "other").close()


@pytest.mark.parametrize(("age", "renewed"), [(2, True), (2, False), (7200, True)])
def test_where_a_lock_holds_on_one_machine_only_another_one_s_sign_of_life_counts(
    tmp_path, monkeypatch, age, renewed
):
    monkeypatch.setattr(run_folder, "_SIGN_SECONDS", 0.02)
    run_folder.lock(tmp_path).close()
    path, slept, last = tmp_path / "control" / "train.lock.json", [], time.time() - age
    assert not path.exists()

    def sleep(seconds):
        written = last + len(slept) * renewed
        files.replace_json(path, {"host": "elsewhere", "process": 7, "time": written})
        slept.append(seconds)

    sleep(0)
    monkeypatch.setattr(run_folder.time, "sleep", sleep)
    assert run_folder.holder(tmp_path) == ("process 7 on elsewhere" if age < 60 else "")
    if age < 60 and renewed:
        with pytest.raises(ValueError, match=r"is being trained .* \(process 7 on elsewhere\)"):
            run_folder.lock(tmp_path)
        assert path.exists()
    else:
        run_folder.lock(tmp_path).close()
        assert (len(slept) > 1) == (age < 60)


def test_who_holds_a_lock_is_seen_without_taking_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.control, "repeated", lambda *_: contextlib.nullcontext())
    with run_folder.lock(tmp_path):
        monkeypatch.setattr("fcntl.flock", pytest.fail)
        assert run_folder.holder(tmp_path) == f"process {os.getpid()} on {socket.gethostname()}"
        path = tmp_path / "control" / "train.lock.json"
        sign = json.loads(path.read_text())
        for other in ({"process": 2**22 + 1}, {"time": 1.0}):  # it is gone, or came later
            files.replace_json(path, {**sign, **other})
            assert run_folder.holder(tmp_path) == ""
        files.replace_json(path, {**sign, "host": "elsewhere"})
    assert path.exists(), "it is another machine's, which has taken over"


def test_a_lock_that_cannot_be_closed_harms_no_run(tmp_path, monkeypatch):
    """As on sshfs whose connection was lost."""

    def fail():
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(files, "lock", lambda *_: SimpleNamespace(close=fail))
    run_folder.lock(tmp_path).close()


def test_an_attempt_is_superseded_by_any_later_one_and_by_nothing_else():
    mine = {"kind": "attempt", "attempt": 1, "token": "a", "pid": 1, "host": "here"}
    other = {**mine, "token": "b", "pid": 7, "host": "there"}
    run_folder.check_not_superseded([{"kind": "created"}, mine, {"kind": "commit"}], "a")
    run_folder.check_not_superseded([other, mine], "a")
    # Both read the ledger at once and took the same number: the token tells them apart.
    with pytest.raises(ValueError, match=r"attempt 1 \(process 7 on there\) has begun"):
        run_folder.check_not_superseded([mine, other, {"kind": "commit"}], "a")
    with pytest.raises(ValueError, match=r"ledger\.jsonl: has lost the records"):
        run_folder.check_not_superseded([{"kind": "crash"}], "a")


def test_a_run_begins_once_even_where_a_launch_failed_before(recipe, tmp_path):
    config = recipe.load(tmp_path / "run")
    path = tmp_path / "run" / ledger.FILE_NAME
    path.parent.mkdir()
    ledger.append(path, "crash", attempt=1, reason="the launcher ended with code 1")
    for _ in range(2):
        segments.begin(check_run(config))
    assert [record["kind"] for record in ledger.read_ledger(path)] == ["crash", "segment"]


def test_no_attempt_resumes_from_checkpoints_that_a_spike_may_have_spoiled(recipe, tmp_path):
    config = recipe.load(tmp_path / "run")
    records = [
        {"number": 0, "kind": "commit", "step": 10},
        {"number": 1, "kind": "spike", "step": 9, "onset": 7, "channel": "fast"},
    ]
    setup.check_no_open_spike(config, ledger.run_state(records[:1]))
    with pytest.raises(ValueError, match=r"spiked since step 7 .* `zeroclap supervise`"):
        setup.check_no_open_spike(config, ledger.run_state(records))


@pytest.mark.parametrize("is_known", [False, True])
def test_kept_tables_of_blocks_are_compared_with_their_hashes_once(
    is_known, recipe, corpus, tmp_path, monkeypatch
):
    folder = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    config = recipe.load(tmp_path / "run", f"data.corpus={folder}")
    recipe_checks.check(config, 1)
    manifests = check_run(config).manifests
    file, *_ = folder.glob(f"blocks/train-*-{config.data.sequence_length}-*/ranges.npy")
    if is_known:
        run_folder.check_corpora(manifests)
        with monkeypatch.context() as patch:
            patch.setattr(cache, "sha256_of", None)
            patch.setattr(contents, "sha256_of", None)
            run_folder.check_corpora(manifests)
    np.save(file, np.load(file)[::-1])
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{file}: is damaged; delete {file.parent}"):
            run_folder.check_corpora(manifests)
    shutil.rmtree(file.parent)
    run_folder.check_corpora(manifests)
