"""A JSON file that is nested too deeply to be parsed is refused by name."""

import pytest

from data_prep import gpt2_vocabulary
from data_prep.common import files
from pretrain.records import checkpoints, ledger
from pretrain.spikes import replay

READERS = {
    "vocab.json": lambda path: gpt2_vocabulary.read_vocabulary(path.parent),
    "config.json": files.read_json,  # by which most are read
    "MANIFEST.json": lambda path: checkpoints.read_manifest(path.parent),
    "ledger.jsonl": ledger.read_ledger,
    "curve.jsonl": replay.read_curve,
}


@pytest.mark.parametrize("name", READERS)
def test_json_that_is_nested_too_deeply_is_refused_by_name(name, tmp_path):
    (tmp_path / "merges.txt").touch()
    (tmp_path / "model.safetensors").touch()
    path = tmp_path / name
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(ValueError, match=str(tmp_path)):
        READERS[name](path)
