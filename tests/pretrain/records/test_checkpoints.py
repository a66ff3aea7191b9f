"""Checkpoints that are committed by all ranks or do not exist."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from pretrain.records import checkpoints
from pretrain.records.checkpoints import ResumePoint
from pretrain.records.collective import Failure, Group
from tests.pretrain.builders import ALONE, commit_checkpoint, failing

FILES = {
    "mp_rank_00_model_states.pt": (0, b"weights" * 100),
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": (0, b"first half"),
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": (1, b"second half"),
    "zero_pp_rank_12_mp_rank_00_model_states.pt": (12, b"of rank twelve"),
}


def committed(run, step=20, facts=dict):
    """A checkpoint written by one process that plays ranks 0, 1 and 12."""
    folder = checkpoints.folder_of(run, step)

    def write(staging):
        for name, (_, content) in FILES.items():
            (staging / name).write_bytes(content)

    def gather(answer):
        if isinstance(answer, str):  # a reason of rank 0
            return [answer]
        staging = folder.with_name(folder.name + ".t.partial")
        others = {
            name: checkpoints.fingerprint(staging / name)
            for name, (owner, _) in FILES.items()
            if owner != 0
        }
        return [answer, (others, "")]

    commit_checkpoint(run, step, write, Group(0, 1, gather, ALONE.broadcast), facts)
    return folder


def test_a_committed_checkpoint_verifies_and_keeps_its_facts(tmp_path):
    folder = committed(tmp_path, facts=lambda: {"ranks": 2})
    manifest = checkpoints.read_manifest(folder)
    assert folder.name == "step-00000020"
    assert manifest["step"] == 20
    assert manifest["ranks"] == 2
    assert manifest["files"].keys() == FILES.keys()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_everything_is_on_disk_before_the_name_that_says_so(tmp_path, monkeypatch):
    """As far as a file system keeps what it was told to sync."""
    done, sync, rename, replace = [], os.fsync, Path.rename, Path.replace

    def follow(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def named(action, path, target):
        done.append(f"to {target.name}")
        return action(path, target)

    monkeypatch.setattr(os, "fsync", follow)
    monkeypatch.setattr(Path, "rename", lambda path, target: named(rename, path, target))
    monkeypatch.setattr(Path, "replace", lambda path, target: named(replace, path, target))
    folder = committed(tmp_path)
    *files_synced, partial, manifest, staging, checkpoint, parent = done
    assert {*files_synced} == {name for name, (owner, *_) in FILES.items() if owner == 0}
    assert partial.startswith(f".{checkpoints.MANIFEST}.")
    expected = [f"to {checkpoints.MANIFEST}", f"{folder.name}.t.partial", f"to {folder.name}"]
    assert [manifest, staging, checkpoint, parent] == [*expected, folder.parent.name]


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_is_hashed_by_the_rank_that_wrote_it(name, tmp_path):
    assert checkpoints._owner(tmp_path / name) == FILES[name][0]


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_cut_or_changed_file_is_named(name, tmp_path):
    path = committed(tmp_path) / name
    content = path.read_bytes()

    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"{name}: has {len(content) - 1} bytes, {len(content)}"):
        checkpoints.read_manifest(path.parent)
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(ValueError, match=f"{name}: is not what was written"):
        checkpoints.read_manifest(path.parent)
    path.unlink()
    with pytest.raises(ValueError, match=f"{name}: is missing"):
        checkpoints.read_manifest(path.parent)
    path.write_bytes(content)
    checkpoints.read_manifest(path.parent)


def test_ranks_that_share_the_files_compare_each_once(tmp_path, monkeypatch):
    folder = committed(tmp_path)
    hashed = []
    fingerprint = checkpoints.fingerprint
    monkeypatch.setattr(
        checkpoints, "fingerprint", lambda path: hashed.append(path.name) or fingerprint(path)
    )
    for part in range(3):
        checkpoints.read_manifest(folder, "", part, 3)
    assert sorted(hashed) == sorted(FILES)
    last = folder / max(FILES)
    last.write_bytes(last.read_bytes() + b"more")
    owner = sorted(FILES).index(last.name) % 3
    for part in {*range(3)} - {owner}:
        checkpoints.read_manifest(folder, "", part, 3)
    with pytest.raises(ValueError, match=last.name):
        checkpoints.read_manifest(folder, "", owner, 3)


def test_a_checkpoint_of_another_format_is_refused_with_both(tmp_path):
    path = committed(tmp_path) / checkpoints.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2}))
    with pytest.raises(ValueError, match="format version 2 .* known: 1"):
        checkpoints.read_manifest(path.parent)


@pytest.mark.parametrize(
    "text", [None, "", "{", "{}", "[]", '{"files": []}', '{"files": {"a": 1}}', '{"files": {}}']
)
def test_a_folder_without_a_sound_manifest_is_not_a_checkpoint(text, tmp_path):
    folder = committed(tmp_path)
    (folder / checkpoints.MANIFEST).unlink()
    (folder / "a").write_text("")
    if text is not None:
        (folder / checkpoints.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="step-00000020: not a checkpoint"):
        checkpoints.read_manifest(folder)


def killed(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("dies", ["while writing", "before the manifest", "before the rename"])
def test_a_save_that_dies_commits_nothing_and_the_next_one_starts_clean(
    dies, tmp_path, monkeypatch
):
    folder = checkpoints.folder_of(tmp_path, 20)

    def write(staging):
        (staging / "stale.pt").write_bytes(b"half")
        if dies == "while writing":
            killed()

    if dies == "before the manifest":
        monkeypatch.setattr(checkpoints, "write_json", killed)
    if dies == "before the rename":
        monkeypatch.setattr(checkpoints.Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        commit_checkpoint(tmp_path, 20, write)
    monkeypatch.undo()
    assert not folder.exists()
    assert checkpoints.read_manifest(committed(tmp_path))["files"].keys() == FILES.keys()
    assert not list(folder.parent.glob("*.partial"))


def saving(folder, write, **keywords):
    """What a rank does: `write(rank, staging)` in a save of step 5; what it failed with."""
    from pretrain.engine import engine
    from pretrain.engine.distributed import broadcast, gather

    rank = engine.start().rank
    group = Group(rank, 2, gather, broadcast)
    try:
        commit_checkpoint(folder, 5, lambda staging: write(rank, staging), group, **keywords)
    except Failure as failure:
        return str(failure)
    return ""


def part(rank, staging):
    (staging / f"zero_pp_rank_{rank}_.pt").write_bytes(b"x")


def test_each_rank_hashes_what_it_wrote_and_nothing_else(run_ranks, tmp_path):
    def work():
        hashed = []
        fingerprint = checkpoints.fingerprint
        checkpoints.fingerprint = lambda path: hashed.append(path.name) or fingerprint(path)
        assert saving(tmp_path, part) == ""
        return hashed

    assert run_ranks(2, work) == [["zero_pp_rank_0_.pt"], ["zero_pp_rank_1_.pt"]]


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_leaves_nothing(run_ranks, tmp_path):
    def write(rank, staging):
        part(rank, staging)
        if rank == 1:
            raise OSError("disk full")

    assert run_ranks(2, saving, tmp_path, write) == ["disk full (rank 1)"] * 2
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_rank_0_objects_to_before_the_commit_is_not_committed(run_ranks, tmp_path):
    def objection():
        raise ValueError("another has taken over")

    failures = run_ranks(2, lambda: saving(tmp_path, part, facts=objection))
    assert failures == ["another has taken over (rank 0)"] * 2
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_nothing_is_committed_before_the_slowest_rank_has_written(run_ranks, tmp_path):
    final = checkpoints.folder_of(tmp_path, 5)

    def write(rank, staging):
        if rank == 1:
            time.sleep(0.3)
            assert not final.exists()
            assert not (staging / checkpoints.MANIFEST).exists()
        part(rank, staging)

    assert run_ranks(2, saving, tmp_path, write) == ["", ""]
    assert len(checkpoints.read_manifest(final)["files"]) == 2


def test_the_newest_intact_checkpoint_is_found_with_the_reasons_against_newer_ones(tmp_path):
    folders = {step: committed(tmp_path, step) for step in (10, 20, 30, 40)}
    hashes = {step: checkpoints.manifest_hash(tmp_path, step) for step in folders}
    manifest = folders[40] / checkpoints.MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    (folders[30] / min(FILES)).unlink()
    (folders[20] / max(FILES)).write_bytes(b"")
    point = checkpoints.find_resume_point(tmp_path, hashes, ALONE)
    assert point.step == point.manifest["step"] == 10
    assert list(point.rejected) == [40, 30, 20]
    assert point.damaged == {20, 40}
    for step, reason in (40, "what was committed"), (30, "missing"), (20, "has 0 bytes"):
        assert reason in point.rejected[step]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_checkpoint_whose_files_cannot_be_read_for_a_moment_is_whole(
    tmp_path, monkeypatch, no_waiting, number
):
    committed(tmp_path, 10)
    hashed = failing(checkpoints.fingerprint, [number] * 3)
    monkeypatch.setattr(checkpoints, "fingerprint", hashed)
    assert checkpoints.find_resume_point(tmp_path, {10: ""}, ALONE).step == 10


def test_a_checkpoint_that_cannot_be_read_is_rejected_but_not_as_damaged(
    tmp_path, monkeypatch, no_waiting
):
    for step in (10, 20):
        committed(tmp_path, step)
    hashed = failing(checkpoints.fingerprint, [errno.EIO] * 4)
    monkeypatch.setattr(checkpoints, "fingerprint", hashed)
    point = checkpoints.find_resume_point(tmp_path, {10: "", 20: ""}, ALONE)
    assert point.step == 10
    assert "Input/output error" in point.rejected[20]
    assert point.damaged == frozenset()


def test_a_checkpoint_that_one_rank_alone_finds_damaged_is_damaged(tmp_path):
    for step in (10, 20):
        committed(tmp_path, step)
    others = iter([("hash differs", True), ("", False)])
    group = Group(0, 2, lambda mine: [mine, next(others)], ALONE.broadcast)
    point = checkpoints.find_resume_point(tmp_path, {10: "", 20: ""}, group)
    assert (point.step, point.damaged) == (10, {20})
    assert point.rejected == {20: "hash differs (rank 1)"}


def test_a_run_begins_at_0_without_checkpoints_but_not_where_all_are_damaged(tmp_path):
    assert checkpoints.find_resume_point(tmp_path, {}, ALONE) == ResumePoint(0, None, {})
    with pytest.raises(Failure, match="none of its checkpoints is intact.*step-00000020.*00000010"):
        checkpoints.find_resume_point(tmp_path, {10: "", 20: ""}, ALONE)


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path, monkeypatch):
    manifest = checkpoints.read_manifest(committed(tmp_path))
    size = checkpoints.size_of(manifest)
    assert size == sum(len(content) for _, content in FILES.values())
    usage = shutil.disk_usage(tmp_path)._replace(free=3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    checkpoints.check_disk_space(tmp_path, 3, 1_000_000)
    with pytest.raises(ValueError, match="4 checkpoints of 1.0 MB need 4.0 MB, .* 3.0 MB free"):
        checkpoints.check_disk_space(tmp_path, 4, 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=path.name))
    assert checkpoints.free_bytes(tmp_path) == "checkpoints", "it may be a link to another disk"
    assert checkpoints.free_bytes(tmp_path.parent) == tmp_path.parent.name


def test_remove_deletes_all_checkpoints_but_those_to_keep(tmp_path):
    for step in (10, 20, 30):
        committed(tmp_path, step)
    leftover = tmp_path / "checkpoints" / "step-00000040.partial"
    leftover.mkdir()
    (leftover / "x.pt").write_bytes(b"x")
    beside = tmp_path / "checkpoints" / "zero_to_fp32.py"
    beside.write_text("")
    checkpoints.remove(tmp_path, {20, 99}, pytest.fail)
    assert {path.name for path in beside.parent.iterdir()} == {"step-00000020", beside.name}
    checkpoints.read_manifest(checkpoints.folder_of(tmp_path, 20))


def test_a_removal_that_dies_leaves_nothing_that_passes_for_a_checkpoint(tmp_path, monkeypatch):
    folder = committed(tmp_path, 10)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.remove(tmp_path, set(), pytest.fail)
    monkeypatch.undo()
    assert (folder / "mp_rank_00_model_states.pt").exists()
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoints.read_manifest(folder)
    checkpoints.remove(tmp_path, set(), pytest.fail)
    assert not folder.exists()


def busy(monkeypatch, name):
    """A file that cannot be deleted, as one that another machine has open on NFS."""
    unlink = os.unlink

    def refuses(path, *arguments, **keywords):
        if os.fspath(path).endswith(name):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        unlink(path, *arguments, **keywords)

    monkeypatch.setattr(os, "unlink", refuses)


def test_a_folder_that_cannot_be_deleted_is_not_a_checkpoint_and_is_deleted_later(
    tmp_path, monkeypatch, no_waiting
):
    folder, other = committed(tmp_path, 10), committed(tmp_path, 20)
    warnings = []
    with monkeypatch.context() as patch:
        busy(patch, ".nfs0001")
        (folder / ".nfs0001").touch()
        checkpoints.remove(tmp_path, set(), warnings.append)
    assert not other.exists()
    assert [path.name for path in folder.iterdir()] == [".nfs0001"]
    (warning,) = warnings
    assert warning.startswith(f"WARNING: {folder}: cannot be deleted for now: ")
    checkpoints.remove(tmp_path, set(), pytest.fail)
    assert not folder.exists()


def test_a_checkpoint_takes_the_place_of_one_that_cannot_be_deleted(tmp_path, monkeypatch):
    folder = committed(tmp_path, 10)
    (folder / ".nfs0001").touch()
    with monkeypatch.context() as patch:
        busy(patch, ".nfs0001")
        committed(tmp_path, 10)
    assert checkpoints.read_manifest(folder)["files"].keys() == FILES.keys()
    assert len([*folder.parent.iterdir()]) == 2
    checkpoints.remove(tmp_path, {10}, pytest.fail)
    assert [*folder.parent.iterdir()] == [folder]
