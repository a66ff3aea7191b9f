"""A folder of the cache is made once, whoever makes it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from data_prep import cache


@pytest.mark.parametrize("is_late", [False, True])
def test_a_folder_that_another_machine_has_made_meanwhile_is_returned(
    is_late, tmp_path, monkeypatch
):
    """Before the new folder is begun, or after."""
    original: Callable[[Path], AbstractContextManager[Path]] = cache.new_folder

    def theirs():
        with original(tmp_path / "blocks" / "train") as folder:
            (folder / "theirs").touch()

    def raced(path):
        if not is_late:
            theirs()
        return original(path)

    monkeypatch.setattr(cache, "new_folder", raced)
    made = cache.made(tmp_path, "0" * 64, "train", lambda folder: theirs())
    assert [path.name for path in made.iterdir()] == ["theirs"]


def test_what_cannot_be_made_is_said_as_it_is(tmp_path):
    def refuse(folder):
        raise ValueError("no sentences")

    with pytest.raises(ValueError, match=r"^no sentences$"):
        cache.made(tmp_path, "0" * 64, "train", refuse)


def test_what_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / "blocks" / ".train.0123456789abcdef.partial"
    left.mkdir(parents=True)
    made = cache.made(tmp_path, "0" * 64, "train", lambda folder: None)
    assert [*made.parent.iterdir()] == [made]
