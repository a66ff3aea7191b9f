import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from data_prep import duplicates
from data_prep.documents import Document, Reject, read
from data_prep.duplicates import hash_input, mark_duplicates
from data_prep.filters import filtered
from data_prep.manifest import Settings, load_manifest
from data_prep.run import prepare
from tests.data_prep.conftest import make_texts, write_pile


@dataclass(frozen=True)
class Task:
    """The fields of a `ShardTask` that the functions use."""

    index: int
    input: Path
    corpus: Path
    settings: Settings = Settings(duplicates="drop")

    def file(self, suffix: str) -> Path:
        return self.corpus / "shards" / f"shard-{self.index:05d}{suffix}"


def tasks_for(tmp_path: Path, texts: list[list[str]]) -> list[Task]:
    return [
        Task(number, write_pile(tmp_path / f"{number}.jsonl.zst", part), tmp_path / "corpus")
        for number, part in enumerate(texts)
    ]


def kept(tasks: list[Task]) -> list[list[str]]:
    return [
        [r.text for r in filtered(read(task.input), task) if isinstance(r, Document)]
        for task in tasks
    ]


def random_parts() -> list[list[str]]:
    generator = np.random.default_rng(0)
    pool = np.array(make_texts(150, 5))
    return [list(generator.choice(pool, size)) for size in (120, 0, 1, 77, 200)]


@pytest.mark.parametrize("part_documents", [10, 50, 1000])
def test_first_of_equal_texts_stays_across_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_documents: int
) -> None:
    monkeypatch.setattr(duplicates, "PART_DOCUMENTS", part_documents)
    monkeypatch.setattr(duplicates, "_CHUNK_DOCUMENTS", 7)
    parts = random_parts()
    tasks = tasks_for(tmp_path, parts)
    for task in reversed(tasks):  # in any order
        assert hash_input(task) == len(parts[task.index])
    seen: set[str] = set()
    expected = [[t for t in part if not (t in seen or seen.add(t))] for part in parts]
    assert mark_duplicates(tasks) == sum(map(len, parts)) - len(seen)
    assert kept(tasks) == expected


def test_marked_documents_become_rejects_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    meta = {"pile_set_name": "X"}
    lines = [json.dumps({"text": text, "meta": meta}) for text in ("a", "b", "a")]
    file.write_text("\n".join([lines[0], "{", lines[1], '{"text": ""}', lines[2]]))
    task = Task(0, file, tmp_path / "corpus")
    assert hash_input(task) == 3
    assert mark_duplicates([task]) == 1
    found = list(filtered(read(file), task))
    assert found[:4] == list(read(file))[:4]
    assert found[4] == Reject("duplicate", "X", str(file), 5, 1)


def test_order_of_the_tasks_decides_which_text_stays(tmp_path: Path) -> None:
    tasks = tasks_for(tmp_path, [["a", "b"], ["b", "c"]])
    for task in tasks:
        hash_input(task)
    mark_duplicates(tasks[::-1])
    assert kept(tasks) == [["a"], ["b", "c"]]


def test_only_changed_inputs_are_hashed_again(tmp_path: Path) -> None:
    tasks = tasks_for(tmp_path, [["a", "b"], ["b", "c"]])
    files = [task.file(".hashes") for task in tasks]
    for task in tasks:
        hash_input(task)
    before = [file.stat().st_mtime_ns for file in files]
    write_pile(tasks[1].input, ["b", "c", "a"])
    with pytest.raises(
        ValueError, match=r"shard-00001\.hashes: missing, or made before .*1\.jsonl"
    ):
        mark_duplicates(tasks)
    assert [hash_input(task) for task in tasks] == [2, 3]
    assert files[0].stat().st_mtime_ns == before[0]
    assert files[1].stat().st_mtime_ns != before[1]
    assert mark_duplicates(tasks) == 2
    os.utime(tasks[0].input, (1, 1))
    with pytest.raises(ValueError, match=r"shard-00000\.duplicates: missing, or made before"):
        next(filtered(read(tasks[0].input), tasks[0]))


def test_missing_marks_are_an_error(tmp_path: Path) -> None:
    (task,) = tasks_for(tmp_path, [["a"]])
    with pytest.raises(ValueError, match=r"shard-00000\.hashes: missing.*run prepare from its"):
        mark_duplicates([task])
    with pytest.raises(ValueError, match=r"shard-00000\.duplicates: missing"):
        next(filtered(read(task.input), task))


def test_damaged_input_fails_or_gives_its_complete_records(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    texts = [" ".join(map(str, generator.integers(0, 10**9, 300))) for _ in range(200)]
    (task,) = tasks_for(tmp_path, [texts])
    task.input.write_bytes(task.input.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"0\.jsonl\.zst: cut short"):
        hash_input(task)
    assert list((tmp_path / "corpus" / "shards").iterdir()) == []
    keeping = Task(0, task.input, task.corpus, Settings(duplicates="drop", damaged="keep"))
    assert 0 < hash_input(keeping) < 200
    assert mark_duplicates([keeping]) == 0


def test_hashes_are_those_of_the_texts_in_reading_order(tmp_path: Path) -> None:
    (task,) = tasks_for(tmp_path, [["ä", "b"]])
    hash_input(task)
    content = task.file(".hashes").read_bytes()
    # As printed by b2sum --length=128.
    assert content[16:].hex(" ", 16) == (
        "cb4d3892d2cb5e6b1bd63f7e4247a02e 96172b4c53372cd10faddc821bfe0318"
    )


def test_corpus_without_duplicates_does_not_depend_on_workers_or_kills(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    parts = [["a a", "b b", "a a"], ["b b", "c c"], ["c c", "d d"]]
    inputs = [write_pile(tmp_path / f"{n}.jsonl.zst", part) for n, part in enumerate(parts)]
    settings = Settings(valid_fraction=0.0, duplicates="drop")
    one, three = tmp_path / "one", tmp_path / "three"
    manifest = prepare(inputs, one, tokenizer_folder, settings)
    assert prepare(inputs, three, tokenizer_folder, settings, workers=3) == manifest
    assert manifest.totals["train"].documents == 4
    assert manifest.rejects["duplicate"].count == 3
    assert manifest.rejects["duplicate"].places[0] == f"{inputs[0]}:3"
    assert {file.suffix for file in (one / "shards").iterdir()} == {".json"}
    (one / "manifest.json").unlink()
    (one / "train" / "shard-00001.bin").unlink()
    prepare(inputs, one, tokenizer_folder, settings)
    assert load_manifest(one) == manifest
