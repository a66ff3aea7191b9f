"""push: what is given to the real client, and what is refused before anything is sent."""

from unittest.mock import create_autospec

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from pretrain.__main__ import main


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / "exported" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "exported" / name).write_text(name)
    return tmp_path / "exported"


@pytest.fixture
def logged_in(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_a_token_of_nobody")


@pytest.fixture
def client(monkeypatch):
    """A recording of what the client is asked to do; it takes only the real one's arguments."""
    recorded = create_autospec(HfApi, instance=True)
    recorded.create_repo.return_value.repo_id = "team/model"
    recorded.upload_folder.return_value.commit_url = "https://hub/team/model/commit/1"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: recorded)
    return recorded


@pytest.mark.parametrize("private", [False, True])
def test_the_whole_folder_is_uploaded_once(private, folder, logged_in, client, capsys):
    assert main(["push", str(folder), "team/model", *["--private"] * private]) == 0
    client.create_repo.assert_called_once_with("team/model", private=private, exist_ok=True)
    client.upload_folder.assert_called_once_with(
        repo_id="team/model", folder_path=folder, commit_message="Upload exported"
    )
    assert capsys.readouterr().out == "https://hub/team/model/commit/1\n"


def test_without_a_login_or_a_whole_folder_nothing_is_sent(folder, client, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["push", str(folder), "team/model"]) == 2
    assert "not logged in to the Hugging Face hub, so nothing was sent" in capsys.readouterr().err
    (folder / "config.json").unlink()
    assert main(["push", str(folder), "team/model"]) == 2
    assert f"{folder}: has no config.json" in capsys.readouterr().err
    assert client.mock_calls == []


@pytest.mark.parametrize(
    ("name", "offline", "message"),
    [
        ("team/model", "1", "team/model: the hub cannot be reached, or refuses: Cannot reach"),
        ("team/model", "0", "team/model: the hub cannot be reached, or refuses: "),
        ("a b", "1", "a b: is not a name on the hub: "),
    ],
)
def test_the_real_client_without_network_is_refused_in_a_sentence(
    name, offline, message, folder, logged_in, monkeypatch, capsys
):
    """Offline mode, and an address at which nothing listens."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline == "1")
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9", token="hf_x")
    )
    assert main(["push", str(folder), name]) == 2
    assert message in capsys.readouterr().err
