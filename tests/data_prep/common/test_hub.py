"""Files come from the hub where a name cannot be a path, and errors say why they do not."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from data_prep.common import hub
from tests.hub import hub_of


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "hub" / "someone" / "small-1.0"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "flax_model.msgpack"):
        (folder / name).write_text(name)
    return tmp_path / "hub"


def test_the_files_that_match_are_fetched_once(repository, capsys):
    with hub_of(repository) as asked:
        found = hub.fetch("someone/small-1.0", ["config.json", "*.safetensors"])
        assert {path.name: path.read_text() for path in found.iterdir()} == {
            name: name for name in ("config.json", "model.safetensors")
        }
        assert not any("flax" in path for path in asked)
        with pytest.raises(ValueError, match="none on the Hugging Face hub"):
            hub.fetch("someone/other", ["config.json"])
    assert "asking the Hugging Face hub" in capsys.readouterr().err
    with hub_of(repository):
        huggingface_hub.constants.ENDPOINT = "http://127.0.0.1:9"  # nobody is there
        assert hub.fetch("someone/small-1.0", ["config.json"]) == found
        with pytest.raises(ValueError, match="the hub's cache: .*:9 does not answer .*refused"):
            hub.fetch("someone/other", ["config.json"])


def test_a_text_that_can_be_a_path_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    names = ("roberta-base", "someone/roberta-2.0")
    paths = ("./roberta", "a/b/c", "/a", "../x", "models", "models/a", "", str(Path("models/b")))
    assert [name for name in (*names, *paths) if hub.may_be_name(name)] == [*names]
