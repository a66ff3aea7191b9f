"""Upload of a Hugging Face folder to the hub."""

from __future__ import annotations

from pathlib import Path

from data_prep.common.arguments import typed

_NEEDED = ("config.json", "model.safetensors", "README.md")


def push(folder: Path, name: str, private: bool) -> str:
    """Upload every file of a folder, as one commit of the user who is logged in.

    Args:
        folder: as `convert --to huggingface` makes it.
        name: of the repository; it is made if it does not exist.
        private: whether a new repository is private.

    Returns:
        The address of the commit.

    Raises:
        ValueError: the folder is not complete; nobody is logged in; or the hub cannot be reached or
            refuses. Nothing is sent before the first two are checked.
    """
    from huggingface_hub import HfApi, get_token

    # HTTPError is that of the library that the client is built on, which differs by version.
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    if missing := [file for file in _NEEDED if not (folder / file).is_file()]:
        raise ValueError(
            f"{folder}: has no {', '.join(missing)}; make the folder with "
            f"`{typed('pretrain convert')} MODEL --to huggingface --output FOLDER`"
        )
    if get_token() is None:
        raise ValueError(
            "not logged in to the Hugging Face hub, so nothing was sent; run `hf auth login`, "
            "or put a token into the variable HF_TOKEN"
        )
    api = HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}"
        )
    except HFValidationError as error:
        raise ValueError(f"{name}: is not a name on the hub: {error}") from None
    except (HTTPError, OSError) as error:  # no network, offline mode, or the hub says no
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name}: the hub cannot be reached, or refuses: {reason}") from None
    return str(commit.commit_url)
