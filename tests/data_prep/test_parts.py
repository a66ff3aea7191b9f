import errno
import re

import pytest

from data_prep.parts import Part, hold


@pytest.mark.parametrize("text", ["3/3", "-1/3", "1", "a/b", "1/0", "/", "0/2/3"])
def test_invalid_parts_are_refused(text):
    with pytest.raises(ValueError, match=rf"--shard {re.escape(text)}: accepted: I/N"):
        Part.parse(text)


def test_every_shard_is_in_exactly_one_part():
    for count in (1, 3, 7):
        parts = [Part.parse(f"{index}/{count}") for index in range(count)]
        numbers = [number for part in parts for number in range(5)[part.index :: part.count]]
        assert sorted(numbers) == list(range(5))


def assert_refused(folder, part, message):
    with pytest.raises(ValueError, match=rf"{folder}: {message} \(process"), hold(folder, part):
        pass


def test_parts_share_the_lock_that_a_whole_run_holds_exclusively(tmp_path):
    with hold(tmp_path, Part(0, 2)), hold(tmp_path, Part(1, 2)):
        assert_refused(tmp_path, Part(0, 2), "another prepare of --shard 0/2 is at work")
        assert_refused(tmp_path, None, "another prepare is at work")
    with hold(tmp_path):
        assert_refused(tmp_path, Part(1, 2), "a prepare of all shards is at work")


def test_a_file_system_without_locks_gives_a_warning_and_other_errors_are_raised(
    tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise OSError(code, "not locked")

    monkeypatch.setattr("fcntl.flock", fail)
    code = errno.ENOLCK
    with hold(tmp_path):
        assert "this file system has no locks" in capsys.readouterr().err
    code = errno.EIO
    with pytest.raises(OSError, match="not locked"), hold(tmp_path):
        pass
