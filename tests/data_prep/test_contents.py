"""The binaries of a corpus are bound to the hashes that its manifest lists."""

import contextlib
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from data_prep import cache, contents
from data_prep.manifest import load_manifest
from finetune.zeroclap import main


@pytest.fixture
def hashed(monkeypatch):
    """The files that are hashed as a whole from now on."""
    seen: list[Path] = []
    original = contents.sha256_of
    monkeypatch.setattr(contents, "sha256_of", lambda path: seen.append(path) or original(path))
    return seen


def shuffle(file):
    """Give a file other contents of the same size, and the time that it had."""
    state, ids = file.stat(), np.fromfile(file, dtype=np.uint16)
    np.random.default_rng(0).permutation(ids).tofile(file)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_a_corpus_is_hashed_once_and_so_are_a_copy_and_one_with_another_time(
    copy, tmp_path, hashed
):
    def check_twice(folder):
        hashed.clear()
        for _ in range(2):
            contents.check(folder, load_manifest(folder))
            assert len(hashed) == len(load_manifest(folder).hashes)

    check_twice(copy)
    check_twice(second := shutil.copytree(copy, tmp_path / "second"))
    (copy / "train" / "shard-00000.bin").touch()
    check_twice(copy)
    manifest = load_manifest(copy)
    alike = {
        contents.sample(each, manifest.digest(), [*manifest.hashes]) for each in (copy, second)
    }
    assert len(alike) == 1


@pytest.mark.parametrize("code", [0, 1])
def test_what_verify_has_hashed_is_hashed_again_only_where_it_found_a_problem(
    code, copy, hashed, capsys
):
    if code:
        shuffle(copy / "train" / "shard-00000.bin")
    assert main(["verify", str(copy)]) == code
    assert ("train/shard-00000.bin: its sha256" in capsys.readouterr().err) == code
    hashed.clear()
    with pytest.raises(ValueError, match="sha256 is") if code else contextlib.nullcontext():
        contents.check(copy, load_manifest(copy))
    assert bool(hashed) == code


@pytest.mark.parametrize("notice", [lambda file: None, Path.touch])
@pytest.mark.parametrize("is_known", [False, True])
def test_other_ids_of_the_same_size_are_refused(copy, is_known, notice):
    manifest = load_manifest(copy)
    if is_known:
        contents.check(copy, manifest)
    file = copy / "train" / "shard-00001.bin"
    shuffle(file)
    notice(file)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{file}: its sha256 is .* the manifest has"):
            contents.check(copy, manifest)


def test_a_way_of_cutting_that_keeps_no_table_is_accepted(copy):
    manifest = load_manifest(copy)
    cache.tables(copy, manifest.digest(), "train-one-document", dict)
    for _ in range(2):
        contents.check(copy, manifest)


def test_a_missing_file_is_named(copy):
    manifest = load_manifest(copy)
    (copy / "valid" / "shard-00000.idx").unlink()
    with pytest.raises(ValueError, match=r"valid/shard-00000\.idx: no such file"):
        contents.check(copy, manifest)


def test_a_corpus_that_cannot_be_written_is_hashed_once(copy, hashed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (copy / "blocks").write_text("a file where the folder would be")
    for _ in range(2):
        contents.check(copy, load_manifest(copy))
    assert len(hashed) == len(load_manifest(copy).hashes)


def test_no_file_that_waits_is_hashed_after_the_first_difference(copy, hashed, monkeypatch):
    monkeypatch.setattr("joblib.cpu_count", lambda: 1)
    original = contents.sha256_of
    monkeypatch.setattr(contents, "sha256_of", lambda path: time.sleep(0.05) or original(path))
    shuffle(copy / "train" / "shard-00000.bin")
    with pytest.raises(ValueError, match=r"shard-00000\.bin: its sha256 is"):
        contents.check(copy, load_manifest(copy))
    assert len(hashed) < 6, "of 24"
