"""Files come from the hub, and errors say why they do not (what is no name: test_tokenizer)."""

import huggingface_hub.constants
import pytest

from data_prep.common import hub
from tests.hub import hub_of


def test_the_files_that_match_are_fetched_once(tmp_path, capsys):
    folder = tmp_path / "someone" / "small-1.0"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "flax_model.msgpack"):
        (folder / name).write_text(name)
    with hub_of(tmp_path) as asked:
        found = hub.fetch("someone/small-1.0", ["config.json", "*.safetensors"])
        assert {path.name: path.read_text() for path in found.iterdir()} == {
            name: name for name in ("config.json", "model.safetensors")
        }
        assert not any("flax" in path for path in asked)
        with pytest.raises(ValueError, match="not to be had from the Hugging Face hub"):
            hub.fetch("someone/other", ["config.json"])
    assert "asking the Hugging Face hub" in capsys.readouterr().err
    with hub_of(tmp_path):
        huggingface_hub.constants.ENDPOINT = "http://127.0.0.1:9"  # nobody is there
        assert hub.fetch("someone/small-1.0", ["config.json"]) == found
        with pytest.raises(ValueError, match=r"here, and not in the hub's cache: [^.]+$"):
            hub.fetch("someone/other", ["config.json"])
        notes = capsys.readouterr().err
        assert "note: http://127.0.0.1:9 does not answer ([Errno 111] Connection refused)" in notes
        assert notes.count("does not answer") == 1
    with hub_of(tmp_path):
        huggingface_hub.constants.ENDPOINT = "hub.example"  # which is no URL
        assert hub.fetch("someone/small-1.0", ["config.json"]) == found
        assert "note: hub.example does not answer" in capsys.readouterr().err


def test_the_hub_is_asked_as_its_library_asks_it(tmp_path, monkeypatch):
    """Python's own client knows neither all proxies nor the certificates of the library."""
    with hub_of(tmp_path) as asked:
        monkeypatch.setenv("ALL_PROXY", huggingface_hub.constants.ENDPOINT)
        huggingface_hub.constants.ENDPOINT = "http://hub.invalid"
        huggingface_hub.close_session()
        hub.stay_offline_if_silent()
        huggingface_hub.close_session()
        assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert asked == ["http://hub.invalid/"]
