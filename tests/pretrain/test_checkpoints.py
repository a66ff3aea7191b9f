"""Checkpoints that exist whole or not at all."""

import json
import shutil

import pytest

from pretrain import checkpoints

FILES = {
    "mp_rank_00_model_states.pt": (0, b"weights" * 100),
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": (0, b"first half"),
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": (1, b"second half"),
    "zero_pp_rank_12_mp_rank_00_model_states.pt": (12, b"of rank twelve"),
}


def committed(run, step=20, facts=None):
    """A checkpoint written by one process that plays ranks 0, 1 and 12."""
    folder = checkpoints.folder_of(run, step)

    def write(staging):
        for name, (_, content) in FILES.items():
            (staging / name).write_bytes(content)

    def gather(mine):
        if not mine:
            return [mine]
        staging = folder.with_name(folder.name + ".partial")
        others = {
            name: checkpoints.fingerprint(staging / name)
            for name, (owner, _) in FILES.items()
            if owner != 0
        }
        return [mine, others]

    checkpoints.save(run, step, facts or {}, write=write, gather=gather, rank=0)
    return folder


def test_a_committed_checkpoint_verifies_and_keeps_its_facts(tmp_path):
    folder = committed(tmp_path, facts={"ranks": 2})
    manifest = checkpoints.read_manifest(folder)
    assert folder.name == "step-00000020"
    assert manifest["step"] == 20
    assert manifest["ranks"] == 2
    assert manifest["files"].keys() == FILES.keys()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


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


@pytest.mark.parametrize(
    "text", [None, "", "{", "{}", "[]", '{"files": []}', '{"files": {"a": 1}}']
)
def test_a_folder_without_a_sound_manifest_is_no_checkpoint(text, tmp_path):
    folder = committed(tmp_path)
    (folder / checkpoints.MANIFEST).unlink()
    (folder / "a").write_text("")
    if text is not None:
        (folder / checkpoints.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="step-00000020: is no checkpoint"):
        checkpoints.read_manifest(folder)


def test_a_folder_that_does_not_exist_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="step-00000003: is no checkpoint"):
        checkpoints.read_manifest(checkpoints.folder_of(tmp_path, 3))


@pytest.mark.parametrize("dies", ["while writing", "before the manifest", "before the rename"])
def test_a_save_that_dies_commits_nothing_and_the_next_one_starts_clean(
    dies, tmp_path, monkeypatch
):
    folder = checkpoints.folder_of(tmp_path, 20)

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    def write(staging):
        (staging / "stale.pt").write_bytes(b"half")
        if dies == "while writing":
            killed()

    if dies == "before the manifest":
        monkeypatch.setattr(checkpoints, "write_json", killed)
    if dies == "before the rename":
        monkeypatch.setattr(checkpoints.Path, "rename", killed)
    with pytest.raises(Killed):
        checkpoints.save(tmp_path, 20, {}, write=write, gather=lambda value: [value], rank=0)
    monkeypatch.undo()
    assert not folder.exists()
    assert checkpoints.read_manifest(committed(tmp_path))["files"].keys() == FILES.keys()
    assert not list(folder.parent.glob("*.partial"))


def test_ranks_write_only_into_a_clean_folder_and_leave_only_a_standing_checkpoint(
    run_ranks, tmp_path
):
    def work():
        from pretrain import engine
        from pretrain.distributed import gather

        rank = engine.start().rank
        stale = tmp_path / "checkpoints" / "step-00000005.partial"
        if rank == 0:
            stale.mkdir(parents=True)
            (stale / "zero_pp_rank_1_stale.pt").write_bytes(b"of a killed attempt")
        gather(None)

        def write(folder):
            for number in range(3):
                (folder / f"zero_pp_rank_{rank}_{number}.pt").write_bytes(b"x" * (rank + number))

        checkpoints.save(tmp_path, 5, {}, write=write, gather=gather, rank=rank)
        return sorted(checkpoints.read_manifest(checkpoints.folder_of(tmp_path, 5))["files"])

    expected = [f"zero_pp_rank_{rank}_{number}.pt" for rank in range(2) for number in range(3)]
    assert run_ranks(2, work) == [expected, expected]


def test_a_rank_that_cannot_write_leaves_no_checkpoint(run_ranks, tmp_path):
    def work():
        from pretrain import engine
        from pretrain.distributed import gather

        rank = engine.start().rank

        def write(folder):
            if rank == 1:
                raise OSError("disk full")
            (folder / "zero_pp_rank_0_.pt").write_bytes(b"x")

        checkpoints.save(tmp_path, 5, {}, write=write, gather=gather, rank=rank)

    with pytest.raises(pytest.fail.Exception, match="disk full"):
        run_ranks(2, work)
    assert not checkpoints.folder_of(tmp_path, 5).exists()


def test_remove_keeps_what_it_must_and_says_what_is_gone(tmp_path):
    for step in (10, 20, 30):
        committed(tmp_path, step)
    leftover = tmp_path / "checkpoints" / "step-00000040.partial"
    leftover.mkdir()
    (leftover / "x.pt").write_bytes(b"x")
    beside = tmp_path / "checkpoints" / "zero_to_fp32.py"
    beside.write_text("")
    assert checkpoints.remove(tmp_path, keep={20, 99}) == [10, 30]
    assert {path.name for path in beside.parent.iterdir()} == {"step-00000020", beside.name}
    checkpoints.read_manifest(checkpoints.folder_of(tmp_path, 20))


def test_a_removal_that_dies_leaves_nothing_that_passes_for_a_checkpoint(tmp_path, monkeypatch):
    folder = committed(tmp_path, 10)

    def dies(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.remove(tmp_path, keep=set())
    monkeypatch.undo()
    assert (folder / "mp_rank_00_model_states.pt").exists()
    with pytest.raises(ValueError, match="is no checkpoint"):
        checkpoints.read_manifest(folder)
    assert checkpoints.remove(tmp_path, keep=set()) == [10]


def test_nothing_is_there_to_remove_before_the_first_save(tmp_path):
    assert checkpoints.remove(tmp_path, keep={1}) == []


def test_json_that_is_being_written_does_not_disturb_the_old(tmp_path):
    path = tmp_path / "a.json"
    checkpoints.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        checkpoints.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
