import json
import re
from dataclasses import replace

import pytest

from data_prep.manifest import (
    CorpusManifest,
    Count,
    InputFile,
    LengthHistogram,
    Rejects,
    Settings,
    ShardFiles,
    load_manifest,
    write_record,
)


@pytest.fixture
def manifest():
    return CorpusManifest(
        format_version=1,
        tokenizer_digest="d" * 64,
        vocab_size=320,
        special_ids={"bos": 0, "mask": 319},
        dtype="uint16",
        encoders=["tokenizers"],
        damages=[],
        settings=Settings(64, "drop", 3, 0),
        inputs=[InputFile("é.jsonl", 5, "s")],
        shards={
            "train": [ShardFiles("train/shard-00000", 1, 1, 4, 8, "b", "i", "s", "c", ["X"])],
            "valid": [],
        },
        subsets=["X"],
        totals={"train": Count(1, 4, 9), "valid": Count()},
        kept={"train": {"X": Count(1, 4, 9)}},
        cut=0,
        cut_tokens=0,
        rejects={"empty": Rejects({"X": 2}, ["a:1", "a:2"], {"X": 0})},
        length_histogram=LengthHistogram([2, 3], [0, 1], 0.0, 0.0),
        unigram_perplexity=None,
    )


def test_a_manifest_round_trips(tmp_path, manifest):
    write_record(tmp_path / "manifest.json", manifest)
    assert load_manifest(tmp_path) == manifest


def test_missing_unfinished_and_other_folders_have_different_messages(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: no such folder; .*zeroclap prepare"):
        load_manifest(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        load_manifest(tmp_path)
    (tmp_path / "shards").mkdir()
    with pytest.raises(ValueError, match="its prepare is not finished"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format version 99 was written by a later version of zeroclap"),
        ({"later": 1}, "unknown key 'later'; known are cut, cut_bytes, cut_tokens, damages, "),
    ],
)
def test_damage_is_named(tmp_path, manifest, change, message):
    file = tmp_path / "manifest.json"
    write_record(file, manifest)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_manifest(tmp_path)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("stem", ["../../../../etc/passwd", "/etc/passwd", "train/../shard-0", ""])
def test_files_outside_the_corpus_are_refused(tmp_path, manifest, stem):
    file = tmp_path / "manifest.json"
    write_record(file, manifest)
    file.write_text(file.read_text().replace("train/shard-00000", stem))
    with pytest.raises(ValueError, match=re.escape(f"{file}: stem {stem!r}: accepted: such as")):
        load_manifest(tmp_path)


def test_invalid_json_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format_version": 1')
    with pytest.raises(ValueError, match=r"manifest\.json: is not valid JSON"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 2}, "max-tokens 2"),
        ({"min_tokens": 2049, "max_tokens": 2048}, "min-tokens 2049: accepted: 0 to max-tokens"),
        ({"min_tokens": -1}, "min-tokens -1: accepted: 0 or more"),
        ({"long": "split"}, "long 'split' needs max-tokens"),
        ({"valid_fraction": 1.0}, "valid-fraction 1.0"),
        ({"valid_fraction": -0.1}, "valid-fraction -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Settings(**values)  # type: ignore[arg-type]


def test_digest_depends_on_the_data(manifest):
    other_files = replace(manifest.shards["train"][0], bin_sha256="c")
    other = replace(manifest, shards={"train": [other_files], "valid": []})
    assert replace(manifest, inputs=[]).digest() == manifest.digest()
    assert other.digest() != manifest.digest()
