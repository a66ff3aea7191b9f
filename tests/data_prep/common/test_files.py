import errno
import hashlib
import json
import math
import os
import shutil

import pytest

from data_prep.common import files
from data_prep.common.files import AtomicFile, new_folder, remove_partial_folders, sha256_of


def test_json_has_null_for_every_number_that_is_not_finite():
    value = {"a": math.nan, "b": [1.5, math.inf, {"c": (-math.inf, 2, True, None, "NaN")}]}
    text = files.strict_json(value)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.5, None, {"c": [None, 2, True, None, "NaN"]}],
    }
    assert math.isnan(value["a"])  # type: ignore[arg-type]


def test_failed_reads_are_retried_unless_the_file_is_missing():
    waited: list[float] = []
    errors: list[OSError] = [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "input")]

    def read():
        if errors:
            raise errors.pop(0)
        return "content"

    assert files.retried(read, waited.append) == "content"
    assert waited == list(files._PAUSES[:2])
    errors += [OSError(errno.EIO, str(number)) for number in range(9)]
    with pytest.raises(OSError, match="3"):
        files.retried(read, waited.append)
    errors[:] = [FileNotFoundError(errno.ENOENT, "none")]
    with pytest.raises(FileNotFoundError):
        files.retried(read, pytest.fail)


def test_a_lock_on_a_full_disk_names_its_file_and_is_not_held(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match=r"No space left on device: .*/a.lock"):
            files.lock(tmp_path / "a.lock", "is busy")
    files.lock(tmp_path / "a.lock", "is busy").close()


def test_file_appears_on_commit_only(tmp_path):
    path = tmp_path / "new" / "a"
    file = AtomicFile(path)
    file.write(b"one")
    file.write(memoryview(b" two"))
    assert not path.exists()
    record = file.commit()
    file.discard()
    assert path.read_bytes() == b"one two"
    assert record.size_bytes == 7
    assert record.sha256 == sha256_of(path) == hashlib.sha256(b"one two").hexdigest()
    again = AtomicFile(path)
    again.write(b"new")
    again.discard()
    assert path.read_bytes() == b"one two"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_appears_when_it_is_complete_and_a_failure_leaves_nothing(tmp_path):
    target = tmp_path / "deep" / "target"
    with pytest.raises(FileNotFoundError), new_folder(target) as folder:
        (folder / "nowhere" / "file").write_text("content")
    with pytest.raises(OSError, match="full: .*/deep/target'"), new_folder(target):
        raise OSError(errno.ENOSPC, "full")
    assert list(target.parent.iterdir()) == []
    with new_folder(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("content")
        assert not target.exists()
    assert (target / "inner" / "file").read_text() == "content"
    assert list(target.parent.iterdir()) == [target]


def test_folders_left_by_killed_processes_can_be_removed(tmp_path):
    target, kept = tmp_path / "target", ("target", ".target", ".other.1.partial", ".target.1")
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".target.12.partial").mkdir()
    with new_folder(tmp_path / "new") as folder:
        (folder / "file").write_text("content")
        shutil.copytree(folder, folder.with_name(folder.name.replace("new", "target")))
    remove_partial_folders(target)
    assert {path.name for path in tmp_path.iterdir()} == {"new", *kept}


def test_what_a_killed_process_left_of_a_file_does_not_fill_a_folder(tmp_path):
    """The same command makes the file then, as `train-tokenizer` does."""
    files._partial(tmp_path / "tokenizer.json").touch()
    files.check_new(tmp_path)
    (tmp_path / ".my.partial").touch()
    with pytest.raises(ValueError, match="is not empty"):
        files.check_new(tmp_path)


def test_only_a_new_or_an_empty_folder_is_filled(tmp_path):
    empty, full, file = tmp_path / "empty", tmp_path / "full", tmp_path / "file"
    empty.mkdir()
    full.mkdir()
    file.write_text("a file")
    (full / "file").write_text("theirs")
    with new_folder(empty) as folder:
        (folder / "file").write_text("ours")
    assert (empty / "file").read_text() == "ours"
    for taken in (full, file):
        with pytest.raises(ValueError, match="full: is not empty|file: exists"), new_folder(taken):
            pass
    assert (full / "file").read_text() == "theirs"
    assert file.read_text() == "a file"
