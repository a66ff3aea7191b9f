import json

import pytest

from data_prep import contents
from data_prep.indexed import IndexedReader
from data_prep.tokenizer import train
from data_prep.verify import verify
from tests.data_prep.conftest import write_indexed


@pytest.mark.parametrize("suffix", ["bin", "idx", "subsets", "counts"])
@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_only_the_damaged_file_is_named(copy, suffix, damage):
    file = copy / "valid" / f"shard-00001.{suffix}"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content)
    [problem] = verify(copy)
    assert problem.startswith(f"{file}: {'no such file' if damage == 'remove' else 'its sha256'}")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda a, b: [a, [*b[:-2], 320, 2]], "id 320 is outside the vocabulary of 320 ids"),
        (lambda a, b: [a, [*b[:-1], 6]], "a document does not end with </s>"),
        (lambda a, b: [a + b, []], "a document does not end with </s>"),
        (lambda a, b: [a, [*b[:-2], 319, 2]], None),
    ],
)
def test_ids_are_checked_beyond_checksums(copy, monkeypatch, change, problem):
    """The last two documents of a shard have other ids; the counts stay."""
    monkeypatch.setattr(contents, "problem_of", lambda *_: None)
    prefix = copy / "valid" / "shard-00000"
    documents = [ids.tolist() for ids in IndexedReader(prefix)]
    write_indexed(prefix, [*documents[:-2], *change(*documents[-2:])])
    assert [*verify(copy)] == ([f"{prefix}.bin: {problem}"] if problem else [])


def test_subsets_are_checked_beyond_checksums(copy, manifest, monkeypatch):
    monkeypatch.setattr(contents, "problem_of", lambda *_: None)
    number = manifest.shards["valid"][0].documents
    for numbers, found in (
        (bytes(number - 1), f"{number - 1} documents of 1 subsets"),
        (bytes(number + 1), f"{number + 1} documents of 1 subsets"),
        (bytes(number - 1) + b"\1", f"{number} documents of 2 subsets"),
    ):
        (copy / "valid" / "shard-00000.subsets").write_bytes(numbers)
        (problem,) = verify(copy)
        assert f"shard-00000.subsets: {found}, but the manifest has {number} of 1" in problem


@pytest.mark.parametrize("field", ["documents", "sequences", "tokens"])
def test_counts_are_checked(copy, field):
    file = copy / "manifest.json"
    content = json.loads(file.read_text())
    content["shards"]["train"][0][field] += 1
    file.write_text(json.dumps(content))
    *totals, problem = verify(copy)
    assert "train/shard-00000.idx" in problem
    assert "but the manifest has" in problem
    assert all("the totals of the train split" in total for total in totals)
    assert len(totals) == (field != "sequences")


def test_wrong_totals_are_detected(copy):
    file = copy / "manifest.json"
    content = json.loads(file.read_text())
    content["totals"]["valid"]["text_bytes"] += 1
    content["subsets"].append("Other")
    file.write_text(json.dumps(content))
    totals = f"{copy}: the totals of the valid split are not the sums of its shards"
    subsets = f"{copy}: 'subsets' of its manifest are not those of its shards"
    assert list(verify(copy)) == [totals, subsets]


@pytest.mark.parametrize("name", ["rejects", "kept", "cut"])
def test_counts_that_the_shards_do_not_have_are_detected(copy, name):
    shards = {file: json.loads(file.read_text()) for file in copy.glob("shards/*.json")}
    for file, content in shards.items():
        file.write_text(json.dumps(content | {name: 1 if name == "cut" else {}}))
    problem = f"{name!r} of its manifest is not the sum of its shards' manifests"
    assert list(verify(copy)) == [f"{copy}: {problem}"]


def test_workers_do_not_change_the_findings_or_their_order(copy):
    for name in ("train/shard-00001.bin", "valid/shard-00000.idx"):
        (copy / name).unlink()
    assert list(verify(copy, 4)) == list(verify(copy))
    assert len(list(verify(copy, 4))) == 2


def test_different_vocabulary_is_detected(copy):
    problem = "is not the vocabulary that the corpus was made with"
    content = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**content, "vocab_size": 999}))
    assert list(verify(copy)) == [f"{copy / 'tokenizer.json'}: {problem}"]
    (copy / "manifest.json").write_text(json.dumps(content))
    train(iter(["other text"]), 300).save(copy / "tokenizer.json")
    assert list(verify(copy)) == [f"{copy / 'tokenizer.json'}: {problem}"]
    (copy / "tokenizer.json").unlink()
    [problem] = verify(copy)
    assert "has no tokenizer.json" in problem
