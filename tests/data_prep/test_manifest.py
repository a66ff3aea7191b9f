import json
import re
from dataclasses import replace

import pytest

from data_prep.manifest import FILE_NAME, Settings, load_manifest, write_record


def test_a_manifest_round_trips(copy, manifest):
    named = [replace(file, path=f"é/{file.path}") for file in manifest.inputs]
    for other in (manifest, replace(manifest, inputs=named, unigram_perplexity=None)):
        write_record(copy / FILE_NAME, other)
        assert load_manifest(copy) == other


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
        ({"totals": {}}, "shards and totals: their keys must be train and valid"),
        ({"later": 1}, "unknown key 'later'; known are cut, cut_bytes, cut_tokens, damages, "),
    ],
)
def test_damage_is_named(copy, change, message):
    file = copy / FILE_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_manifest(copy)
    assert str(file) in str(error.value)
    file.write_text('{"format_version": 1')
    with pytest.raises(ValueError, match=f"{file}: is not valid JSON"):
        load_manifest(copy)


@pytest.mark.parametrize("stem", ["../../../../etc/passwd", "/etc/passwd", "train/../shard-0", ""])
def test_files_outside_the_corpus_are_refused(copy, stem):
    file = copy / FILE_NAME
    file.write_text(file.read_text().replace("train/shard-00000", stem))
    with pytest.raises(ValueError, match=re.escape(f"{file}: stem {stem!r}: accepted: such as")):
        load_manifest(copy)


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
    first, *others = manifest.shards["train"]
    changed = [replace(first, bin_sha256="c"), *others]
    other = replace(manifest, shards={**manifest.shards, "train": changed})
    assert replace(manifest, inputs=[]).digest() == manifest.digest()
    assert other.digest() != manifest.digest()
