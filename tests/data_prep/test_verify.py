import json
import shutil
from dataclasses import replace

import pytest

from data_prep.common.files import sha256_of
from data_prep.manifest import Count, load_manifest, write_record
from data_prep.tokenizer import train
from data_prep.verify import verify
from tests.data_prep.conftest import write_indexed


def test_intact_corpus_has_no_problem(corpus_and_manifest):
    assert list(verify(corpus_and_manifest[0])) == []


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


def rewrite_shard(copy, documents, subsets):
    """Replace the first validation shard by these documents, including its checksums."""
    manifest = load_manifest(copy)
    files = manifest.shards["valid"][0]
    prefix = copy / files.stem
    write_indexed(prefix, documents)
    prefix.with_suffix(".subsets").write_bytes(subsets)
    changed = replace(
        files,
        bin_sha256=sha256_of(prefix.with_suffix(".bin")),
        idx_sha256=sha256_of(prefix.with_suffix(".idx")),
        subsets_sha256=sha256_of(prefix.with_suffix(".subsets")),
        documents=len(documents),
        sequences=len(documents),
        tokens=sum(map(len, documents)),
    )
    manifest.shards["valid"][0] = changed
    manifest.totals["valid"] += Count(
        changed.documents - files.documents, changed.tokens - files.tokens
    )
    manifest.kept["valid"] = {"Pile-CC": manifest.totals["valid"]}
    write_record(copy / "manifest.json", manifest)
    shutil.rmtree(copy / "shards")  # they count the replaced documents


@pytest.mark.parametrize(
    ("last", "subsets", "problem"),
    [
        ([320, 2], b"\0\0", "shard-00000.bin: id 320 is outside the vocabulary of 320 ids"),
        ([6, 6], b"\0\0", "shard-00000.bin: a document does not end with </s>"),
        ([], b"\0\0", "shard-00000.bin: a document does not end with </s>"),
        ([319, 2], b"\0\0", None),
        ([6, 2], b"\0", "shard-00000.subsets: 1 documents of 1 subsets, but"),
        ([6, 2], b"\0\0\0", "shard-00000.subsets: 3 documents of 1 subsets, but"),
        ([6, 2], b"\0\1", "shard-00000.subsets: 2 documents of 2 subsets, but"),
    ],
)
def test_content_is_checked_beyond_checksums(copy, last, subsets, problem):
    rewrite_shard(copy, [[5, 2], last], subsets)
    found = list(verify(copy))
    assert len(found) == (problem is not None)
    assert not problem or problem in found[0]


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
    file.write_text(json.dumps(content))
    assert list(verify(copy)) == [
        f"{copy}: the totals of the valid split are not the sums of its shards"
    ]


@pytest.mark.parametrize("name", ["rejects", "kept", "cut"])
def test_counts_that_the_shards_do_not_have_are_detected(copy, name):
    shards = {file: json.loads(file.read_text()) for file in copy.glob("shards/*.json")}
    for file, content in shards.items():
        file.write_text(json.dumps(content | {name: 1 if name == "cut" else {}}))
    assert list(verify(copy)) == [
        f"{copy}: {name!r} of its manifest is not the sum of its shards' manifests"
    ]


def test_workers_do_not_change_the_findings_or_their_order(copy):
    for name in ("train/shard-00001.bin", "valid/shard-00000.idx"):
        (copy / name).unlink()
    assert list(verify(copy, 4)) == list(verify(copy))
    assert len(list(verify(copy, 4))) == 2
    with pytest.raises(ValueError, match="--workers 0: accepted: 1 or more"):
        list(verify(copy, 0))


def test_different_vocabulary_is_detected(copy):
    train(iter(["other text"]), 300).save(copy / "tokenizer.json")
    assert list(verify(copy)) == [
        f"{copy / 'tokenizer.json'}: is not the vocabulary that the corpus was made with"
    ]
    (copy / "tokenizer.json").unlink()
    [problem] = verify(copy)
    assert "has no tokenizer.json" in problem
