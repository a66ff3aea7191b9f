import json
import os
from dataclasses import replace

import numpy as np
import pytest

from data_prep import duplicates
from data_prep.documents import Document, Reject, read_documents
from data_prep.duplicates import hash_input, mark_duplicates
from data_prep.filters import filtered
from data_prep.manifest import Settings
from data_prep.run import plan
from tests.data_prep.conftest import make_texts, write_pile

DROP = Settings(duplicates="drop", valid_fraction=0.0)


def tasks_for(tmp_path, texts):
    files = [write_pile(tmp_path / f"{n}.jsonl.zst", part) for n, part in enumerate(texts)]
    return plan(files, [], tmp_path / "corpus", DROP, "")


def kept(tasks):
    return [
        [r.text for r in filtered(read_documents(task.input), task) if isinstance(r, Document)]
        for task in tasks
    ]


def random_parts():
    generator = np.random.default_rng(0)
    pool = np.array(make_texts(150, 5))
    return [list(generator.choice(pool, size)) for size in (120, 0, 1, 77, 200)]


@pytest.mark.parametrize("part_documents", [10, 50, 1000])
def test_first_of_equal_texts_stays_across_inputs(tmp_path, monkeypatch, part_documents):
    monkeypatch.setattr(duplicates, "PART_DOCUMENTS", part_documents)
    monkeypatch.setattr(duplicates, "_CHUNK_DOCUMENTS", 7)
    parts = random_parts()
    tasks = tasks_for(tmp_path, parts)
    for task in reversed(tasks):  # in any order
        hash_input(task)
    seen: set[str] = set()
    expected = [[t for t in part if not (t in seen or seen.add(t))] for part in parts]
    mark_duplicates(tasks)
    assert kept(tasks) == expected


def test_marked_documents_become_rejects_with_their_place(tmp_path):
    file = tmp_path / "a.jsonl"
    meta = {"pile_set_name": "X"}
    lines = [json.dumps({"text": text, "meta": meta}) for text in ("a", "b", "a")]
    file.write_text("\n".join([lines[0], "{", lines[1], '{"text": ""}', lines[2]]))
    (task,) = plan([file], [], tmp_path / "corpus", DROP, "")
    hash_input(task)
    mark_duplicates([task])
    found = list(filtered(read_documents(file), task))
    assert found[:4] == list(read_documents(file))[:4]
    assert found[4] == Reject("duplicate", "X", str(file), 5, 1)


def test_order_of_the_tasks_decides_which_text_stays(tmp_path):
    tasks = tasks_for(tmp_path, [["a", "b"], ["b", "c"]])
    for task in tasks:
        hash_input(task)
    mark_duplicates(tasks[::-1])
    assert kept(tasks) == [["a"], ["b", "c"]]


def test_only_changed_inputs_are_hashed_again(tmp_path):
    tasks = tasks_for(tmp_path, [["a", "b"], ["b", "c"]])
    files = [task.file(".hashes") for task in tasks]
    for task in tasks:
        hash_input(task)
    before = [file.stat().st_mtime_ns for file in files]
    write_pile(tasks[1].input, ["b", "c", "a"])
    with pytest.raises(ValueError, match=r"shard-00001\.hashes: missing"):
        mark_duplicates(tasks)
    for task in tasks:
        hash_input(task)
    assert files[0].stat().st_mtime_ns == before[0]
    assert files[1].stat().st_mtime_ns != before[1]
    mark_duplicates(tasks)
    assert kept(tasks) == [["a", "b"], ["c"]]
    os.utime(tasks[0].input, (1, 1))
    with pytest.raises(ValueError, match=r"shard-00000\.duplicates: missing, or made before"):
        next(filtered(read_documents(tasks[0].input), tasks[0]))


def test_damaged_input_fails_or_gives_its_complete_records(tmp_path):
    generator = np.random.default_rng(0)
    texts = [" ".join(map(str, generator.integers(0, 10**9, 300))) for _ in range(200)]
    (task,) = tasks_for(tmp_path, [texts])
    task.input.write_bytes(task.input.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"0\.jsonl\.zst: cut short"):
        hash_input(task)
    assert list((tmp_path / "corpus" / "shards").iterdir()) == []
    hash_input(replace(task, settings=replace(DROP, damaged="keep")))
    assert 16 < task.file(".hashes").stat().st_size < 16 * 200


def test_hashes_are_those_of_the_texts_in_reading_order(tmp_path):
    (task,) = tasks_for(tmp_path, [["ä", "b"]])
    hash_input(task)
    content = task.file(".hashes").read_bytes()
    # As printed by b2sum --length=128.
    assert content[16:].hex(" ", 16) == (
        "cb4d3892d2cb5e6b1bd63f7e4247a02e 96172b4c53372cd10faddc821bfe0318"
    )
