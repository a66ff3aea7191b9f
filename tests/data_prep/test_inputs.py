from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.documents import Document, Reject, read_documents
from data_prep.inputs import find_inputs, input_sha256, input_state, layout_of


def test_dataset_on_the_hub_gets_its_current_commit(monkeypatch):
    import datasets
    import huggingface_hub

    asked = []

    def load_dataset(*names, **options):
        asked.append((*names, options))
        return [{"text": "a"}, {"txt": "b"}]

    commit = SimpleNamespace(sha="1234abcd")
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: commit)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (source,) = find_inputs(["datasets:owner/name:raw:test"])
    assert source == "datasets:owner/name@1234abcd:raw:test"
    assert find_inputs([source]) == [source]
    assert find_inputs(["datasets:data:data"]) == ["datasets:data@1234abcd:data"]  # nowhere else
    document, reject = read_documents(source)
    assert document == Document("a", "unknown", source, 1)
    assert reject == Reject("no-text", "unknown", source, 2, 0)
    options = {"split": "test", "revision": "1234abcd", "streaming": True}
    assert asked == [("owner/name", "raw", options)]
    assert input_state(source) == (0, 0)
    assert input_sha256(source) != input_sha256(source.replace("1234", "1235"))


def test_layout_distinguishes_ways_to_read_the_same_bytes(tmp_path):
    one, same = tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst"
    others = [f"lines:{one}", f"wikitext:{one}", tmp_path / "a.txt", f"datasets:{tmp_path}"]
    others += [f"datasets:{tmp_path}:raw", f"datasets:{tmp_path}:raw:valid"]
    assert layout_of(one) == layout_of(same)
    assert len({layout_of(source) for source in (one, *others)}) == 7


def test_inputs_are_unique_and_sorted(tmp_path):
    for name in ("b.txt", "a.txt", "c.jsonl", "[d].txt"):
        (tmp_path / name).write_text("text")
    words = [f"{tmp_path}/?.txt", f"{tmp_path}/?.*", f"{tmp_path}/a.txt", f"{tmp_path}/[d].txt"]
    plain = [tmp_path / name for name in ("[d].txt", "a.txt", "b.txt", "c.jsonl")]
    assert find_inputs(words) == plain
    prefixed = [f"lines:{tmp_path}/a.txt", f"lines:{tmp_path}/b.txt"]
    assert find_inputs([f"lines:{tmp_path}/?.txt", *words[:2]]) == sorted(
        [*prefixed, *plain[1:]], key=str
    )
    with pytest.raises(ValueError, match=r"^lines:.*/\*\.zst: no such file"):
        find_inputs([f"lines:{tmp_path}/*.zst"])


def test_a_file_is_read_once_however_it_is_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("c.jsonl", "l.txt"):
        Path(name).write_text("{}\n")
    Path("z.jsonl").symlink_to("c.jsonl")
    assert find_inputs(["./c.jsonl", "c.jsonl", "*.jsonl"]) == [Path("c.jsonl")]
    assert find_inputs([f"{tmp_path}/c.jsonl", "c.jsonl"]) == [tmp_path / "c.jsonl"]
    spellings = ["lines:l.txt", "lines:./l.txt", f"lines:{tmp_path}/l.txt"]
    assert find_inputs(spellings) == find_inputs(spellings[::-1]) == ["lines:./l.txt"]
    # Read in two ways, it is two inputs.
    assert find_inputs(["l.txt", "lines:l.txt", "wikitext:l.txt"]) == [
        *(Path("l.txt"), "lines:l.txt", "wikitext:l.txt")
    ]
    Path("d").mkdir()
    folders = ["datasets:d:raw", "datasets:d:raw:valid"]
    assert find_inputs([*folders, "datasets:d/:raw:train", f"datasets:{tmp_path}/d:raw"]) == [
        *(f"datasets:{tmp_path}/d:raw", folders[1])
    ]


def test_path_has_no_prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lines:a.txt").write_text("one\ntwo")
    (document,) = read_documents(Path("lines:a.txt"))
    assert isinstance(document, Document)
    assert document.text == "one\ntwo"
