import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.documents import Document, Reject
from data_prep.encoders import Encoder
from data_prep.filters import filtered
from data_prep.indexed import IndexedReader
from data_prep.manifest import Settings, ShardTask
from data_prep.shard import existing_manifest, prepare_shard
from data_prep.statistics import count_ids
from data_prep.tokenizer import Tokenizer
from tests.data_prep.conftest import content, make_texts, write_pile
from tests.running import python


@pytest.fixture
def task(tmp_path, tokenizer_folder, tokenizer):
    """Return a task with 300 documents of two subsets, windows of 32 tokens, 1/3 for validation."""
    corpus = shutil.copytree(tokenizer_folder, tmp_path / "corpus")
    file = write_pile(tmp_path / "a.jsonl.zst", make_texts(300, 60))
    settings = Settings(max_tokens=32, long="split", valid_fraction=0.3)
    return ShardTask(0, file, corpus, settings, tokenizer.digest())


def test_bytes_do_not_depend_on_the_batches(task, monkeypatch):
    prepare_shard(task)
    expected = content(task.corpus)
    assert len(expected) == 10
    for documents, characters in ((1, 10**6), (7, 10**6), (10**6, 10**6), (10**6, 500)):
        monkeypatch.setattr("data_prep.shard._BATCH_DOCUMENTS", documents)
        monkeypatch.setattr("data_prep.shard._BATCH_CHARACTERS", characters)
        task.manifest_file.unlink()
        reports = []  # of each batch, and at the end
        prepare_shard(task, reports.append)
        assert len(reports) > 9 if characters == 500 else len(reports) == 1 + -(-300 // documents)
        assert content(task.corpus) == expected


def test_every_piece_ends_with_the_end_token_and_the_manifest_counts_them(task):
    manifest = prepare_shard(task)
    assert set(manifest.files) == {"train", "valid"}
    assert manifest.encoder == "gigatoken 0.10.0"
    for files in manifest.files.values():
        reader = IndexedReader(task.corpus / files.stem)
        ids, lengths = reader.ids, reader.lengths
        assert (ids[np.cumsum(lengths) - 1] == Tokenizer.eos_id).all()
        assert (ids == Tokenizer.eos_id).sum() == len(lengths) == files.documents
        assert files.tokens == len(ids)
        counted = count_ids([task.corpus / files.stem], 320)
        assert counted.tolist() == np.bincount(ids, minlength=320).tolist()


def test_worker_imports_neither_torch_nor_megatron(task):
    program = (
        "import sys, pathlib\n"
        "from data_prep import engines\n"
        "from data_prep.manifest import Settings, ShardTask\n"
        "from data_prep.shard import prepare_shard\n"
        f"prepare_shard(ShardTask(0, pathlib.Path({str(task.input)!r}), "
        f"pathlib.Path({str(task.corpus)!r}), Settings(), {task.tokenizer_digest!r}))\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = set(python("-c", program).split())
    assert {"numpy", "tokenizers", "gigatoken", "orjson"} <= loaded
    heavy = {"torch", "transformers", "megatron", "datasets", "pyarrow", "awkward", "matplotlib"}
    assert not heavy & loaded


def test_complete_records_of_a_damaged_input_are_kept_on_request(task):
    generator = np.random.default_rng(0)
    texts = [" ".join(map(str, generator.integers(0, 10**9, 300))) for _ in range(300)]
    assert isinstance(task.input, Path)
    write_pile(task.input, texts)
    task.input.write_bytes(task.input.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst: cut short or damaged"):
        prepare_shard(task)
    assert [*content(task.corpus)] == ["tokenizer.json"]
    keeping = replace(task, settings=Settings(10_000, damaged="keep", valid_fraction=0.0))
    manifest = prepare_shard(keeping)
    damage = "cut short or damaged: the last zstd frame is incomplete"
    assert manifest.damage == f"{task.input}: {damage}"
    assert 0 < manifest.files["train"].documents < 300
    assert existing_manifest(keeping) == manifest


def change_in_place(file):
    """Change a byte; the size stays."""
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))  # also where the clock is coarse


def test_an_input_changed_in_place_is_another_one(task):
    whole = task.input.read_bytes()
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst: changed while it was read"):
        prepare_shard(task, lambda done: change_in_place(task.input))
    assert [*content(task.corpus)] == ["tokenizer.json"]
    task.input.write_bytes(whole)
    prepare_shard(task)
    change_in_place(task.input)
    with pytest.raises(ValueError, match=r"input .*a\.jsonl\.zst differs from what was read"):
        existing_manifest(task)


def test_sizes_of_texts_are_in_bytes(task, monkeypatch):
    write_pile(task.input, ["é" * 3, "東京", "x", "   ", "é" * 400])
    reports = []
    settings = Settings(max_tokens=100, valid_fraction=0.0)
    manifest = prepare_shard(replace(task, settings=settings), reports.append)
    assert manifest.kept["train"]["Pile-CC"].text_bytes == 6 + 6 + 1
    assert manifest.rejects["too-long"].text_bytes == {"Pile-CC": 800}
    assert reports[-1][:2] == (5, 816)  # what is rejected unencoded was read, too
    split = replace(settings, long="split", min_tokens=20)
    write_pile(task.input, ["é" * 498])  # an id per byte: windows of 98, and one of 16
    manifest = prepare_shard(replace(task, settings=split))
    assert manifest.kept["train"]["Pile-CC"].text_bytes == 980
    assert manifest.rejects["too-short"].text_bytes == {"Pile-CC": 16}
    monkeypatch.setattr(Encoder, "encode", lambda self, texts: [np.empty(0, np.int32)])
    empty = prepare_shard(replace(task, settings=settings))  # as of a normaliser that drops it all
    assert (empty.kept["train"]["Pile-CC"].text_bytes, empty.cut_bytes) == (996, 0)
    (other,) = filtered(iter([Document("é", "X", "a", 1)]), Settings(subset="Y"))
    assert isinstance(other, Reject)
    assert other.text_bytes == 2


def test_file_read_in_another_layout_is_a_different_input(task, tmp_path):
    (tmp_path / "a.txt").write_text("a\nb")
    prepare_shard(replace(task, input=tmp_path / "a.txt"))
    with pytest.raises(ValueError, match=r"input lines:.*a\.txt differs from what was read"):
        existing_manifest(replace(task, input=f"lines:{tmp_path}/a.txt"))
