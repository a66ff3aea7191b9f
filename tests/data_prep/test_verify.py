import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.files import sha256_of
from data_prep.indexed import IndexedWriter
from data_prep.manifest import Settings, load_manifest, write_record
from data_prep.run import prepare
from data_prep.tokenizer import train
from data_prep.verify import verify


@pytest.fixture
def folder(inputs: list[Path], tokenizer_folder: Path, tmp_path: Path) -> Path:
    prepare(inputs[:2], tmp_path, tokenizer_folder, Settings(valid_fraction=0.2))
    return tmp_path


def test_whole_corpus_has_no_problem(folder: Path) -> None:
    assert list(verify(folder)) == []


@pytest.mark.parametrize("suffix", ["bin", "idx", "subsets"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_file_is_named_alone(folder: Path, suffix: str, damage: str) -> None:
    file = folder / "valid" / f"shard-00001.{suffix}"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-1])
    [problem] = verify(folder)
    assert problem.startswith(f"{file}: {'no such file' if damage == 'remove' else 'sha256'}")


def rewrite_shard(folder: Path, documents: list[list[int]]) -> None:
    """Replace the first validation shard by these documents, checksums and all."""
    manifest = load_manifest(folder)
    files = manifest.shards["valid"][0]
    prefix = folder / files.stem
    with IndexedWriter(prefix, np.uint16) as writer:
        for ids in documents:
            writer.append(np.array(ids))
    changed = replace(
        files,
        bin_sha256=sha256_of(prefix.with_suffix(".bin")),
        idx_sha256=sha256_of(prefix.with_suffix(".idx")),
        documents=len(documents),
        tokens=sum(map(len, documents)),
    )
    manifest.shards["valid"][0] = changed
    write_record(folder / "manifest.json", manifest)


@pytest.mark.parametrize(
    ("documents", "problem"),
    [
        ([[5, 2], [320, 2]], r"shard-00000.bin: id 320 in a vocabulary of 320"),
        ([[5, 2], [6, 6]], "shard-00000.bin: a document does not end with </s>"),
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


def test_counts_are_checked(folder: Path) -> None:
    file = folder / "manifest.json"
    content = json.loads(file.read_text())
    content["shards"]["train"][0]["documents"] += 1
    file.write_text(json.dumps(content))
    [problem] = verify(folder)
    assert "but the manifest speaks of" in problem


def test_other_vocabulary_is_noticed(folder: Path) -> None:
    train(iter(["other text"]), 300).save(folder / "tokenizer.json")
    assert list(verify(folder)) == [
        f"{folder / 'tokenizer.json'}: not the vocabulary that the corpus was made with"
    ]
    (folder / "tokenizer.json").unlink()
    [problem] = verify(folder)
    assert "no such file" in problem
