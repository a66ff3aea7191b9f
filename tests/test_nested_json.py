"""A JSON file that is nested too deeply to be parsed is refused by name."""

import pytest

from data_prep import gpt2_vocabulary, manifest
from data_prep.common import files
from finetune import runs as finetune
from pretrain.config import deepspeed as settings
from pretrain.config.sections import BatchConfig
from pretrain.records import checkpoints, ledger
from pretrain.spikes import replay

READERS = {
    "manifest.json": lambda path: manifest.load_manifest(path.parent),
    "vocab.json": lambda path: gpt2_vocabulary.read_vocabulary(path.parent),
    "run.json": lambda path: finetune.read_plan(path.parent),
    "config.json": files.read_json,
    "zero.json": lambda path: settings.read_settings(str(path), BatchConfig(8, 8), 0.0, 1),
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
