import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.common.files import sha256_of
from data_prep.indexed import IndexedWriter
from data_prep.manifest import Settings, load_manifest, write_record
from data_prep.run import prepare
from data_prep.tokenizer import train
from data_prep.verify import verify
from tests.data_prep.conftest import write_pile


@pytest.fixture
def folder(inputs: list[Path], tokenizer_folder: Path, tmp_path: Path) -> Path:
    prepare(inputs[:2], tmp_path, tokenizer_folder, Settings(valid_fraction=0.2))
    return tmp_path


def test_intact_corpus_has_no_problem(folder: Path) -> None:
    assert list(verify(folder)) == []


@pytest.mark.parametrize("suffix", ["bin", "idx", "subsets"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_only_the_damaged_file_is_named(folder: Path, suffix: str, damage: str) -> None:
    file = folder / "valid" / f"shard-00001.{suffix}"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-1])
    [problem] = verify(folder)
    assert problem.startswith(f"{file}: {'no such file' if damage == 'remove' else 'sha256'}")


def rewrite_shard(folder: Path, documents: list[list[int]], subsets: bytes | None = None) -> None:
    """Replace the first validation shard by these documents, including its checksums."""
    manifest = load_manifest(folder)
    files = manifest.shards["valid"][0]
    prefix = folder / files.stem
    with IndexedWriter(prefix, np.uint16) as writer:
        for ids in documents:
            writer.append(np.array(ids))
    prefix.with_suffix(".subsets").write_bytes(
        bytes(len(documents)) if subsets is None else subsets
    )
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
    valid = manifest.totals["valid"]
    valid.documents += changed.documents - files.documents
    valid.tokens += changed.tokens - files.tokens
    manifest.kept["valid"] = {"Pile-CC": valid}
    write_record(folder / "manifest.json", manifest)


@pytest.mark.parametrize(
    ("documents", "problem"),
    [
        ([[5, 2], [320, 2]], r"shard-00000.bin: id 320 in a vocabulary of 320"),
        ([[5, 2], [6, 6]], "shard-00000.bin: a document does not end with </s>"),
        ([[5, 2], []], "shard-00000.bin: a document does not end with </s>"),
        ([[5, 2], [319, 2]], None),
    ],
)
def test_content_is_checked_beyond_checksums(
    folder: Path, documents: list[list[int]], problem: str | None
) -> None:
    rewrite_shard(folder, documents)
    found = list(verify(folder))
    assert len(found) == (problem is not None)
    assert not problem or problem in found[0]


@pytest.mark.parametrize("subsets", [b"\0", b"\0\0\0", b"\0\1"])
def test_subsets_are_checked_beyond_checksums(folder: Path, subsets: bytes) -> None:
    rewrite_shard(folder, [[5, 2], [6, 2]], subsets)
    [problem] = verify(folder)
    assert "shard-00000.subsets" in problem


@pytest.mark.parametrize("field", ["documents", "sequences", "tokens"])
def test_counts_are_checked(folder: Path, field: str) -> None:
    file = folder / "manifest.json"
    content = json.loads(file.read_text())
    content["shards"]["train"][0][field] += 1
    file.write_text(json.dumps(content))
    *totals, problem = verify(folder)
    assert "train/shard-00000.idx" in problem
    assert "but the manifest has" in problem
    assert all("the totals of the train split" in total for total in totals)
    assert len(totals) == (field != "sequences")


def test_wrong_totals_are_detected(folder: Path) -> None:
    file = folder / "manifest.json"
    content = json.loads(file.read_text())
    content["totals"]["valid"]["text_bytes"] += 1
    file.write_text(json.dumps(content))
    assert list(verify(folder)) == [
        f"{folder}: the totals of the valid split are not the sums of its shards"
    ]


def test_workers_do_not_change_the_findings_or_their_order(folder: Path) -> None:
    for name in ("train/shard-00001.bin", "valid/shard-00000.idx"):
        (folder / name).unlink()
    assert list(verify(folder, 4)) == list(verify(folder))
    assert len(list(verify(folder, 4))) == 2
    with pytest.raises(ValueError, match="--workers 0: accepted: 1 or more"):
        list(verify(folder, 0))


def test_corpus_of_sentences_has_no_problem(tokenizer_folder: Path, tmp_path: Path) -> None:
    write_pile(tmp_path / "a.jsonl.zst", [f"One is {n}. Two is more. Three?" for n in range(20)])
    settings = Settings(valid_fraction=0.2, unit="sentence")
    manifest = prepare([tmp_path / "a.jsonl.zst"], tmp_path / "c", tokenizer_folder, settings)
    assert manifest.shards["train"][0].sequences == 3 * manifest.totals["train"].documents
    assert list(verify(tmp_path / "c")) == []


def test_different_vocabulary_is_detected(folder: Path) -> None:
    train(iter(["other text"]), 300).save(folder / "tokenizer.json")
    assert list(verify(folder)) == [
        f"{folder / 'tokenizer.json'}: not the vocabulary that the corpus was made with"
    ]
    (folder / "tokenizer.json").unlink()
    [problem] = verify(folder)
    assert "no such file" in problem
