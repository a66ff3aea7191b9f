"""Fetch files from the Hugging Face hub."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_SECONDS = 5.0
"""Time for the hub to answer at all; the library tries for half a minute."""


def may_be_name(text: str) -> bool:
    """Return whether a text may be a name on the hub: it is no path here, nor in a folder here."""
    path = Path(text)
    in_folder = len(path.parts) > 1 and path.parent.exists()
    return bool(_NAME.fullmatch(text)) and not path.exists() and not in_folder


def fetch(name: str, patterns: Sequence[str]) -> Path:
    """Return a folder in the hub's cache with the files of a repository that match the patterns.

    Raises:
        ValueError: There is no such repository, or the hub does not answer and the files are not
            in the cache.
    """
    from huggingface_hub import constants, snapshot_download

    asks = f"note: {name}: no such file here; asking the Hugging Face hub"
    print(asks, file=sys.stderr, flush=True)
    stay_offline_if_silent()
    local = constants.HF_HUB_OFFLINE
    try:
        return Path(snapshot_download(name, allow_patterns=[*patterns], local_files_only=local))
    except (OSError, ValueError) as error:
        what, *_ = str(error).splitlines() or [type(error).__name__]
        hub = "not in the hub's cache" if local else "none on the Hugging Face hub"
        raise ValueError(f"no such file here, and {hub}: {what}") from error


def stay_offline_if_silent() -> None:
    """Make the libraries of the hub use their caches alone if it does not answer; say so, once.

    Call it before datasets is imported, which reads the setting then.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and (reason := _reason_for_silence(constants.ENDPOINT)):
        print(f"note: {reason}; using only what was downloaded before", file=sys.stderr, flush=True)
        constants.HF_HUB_OFFLINE = True


def _reason_for_silence(endpoint: str) -> str:
    """Return why a server does not answer, or ""."""
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(endpoint, timeout=_SECONDS):
            return ""
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError, http.client.HTTPException) as error:  # is no URL, or not HTTP
        return f"{endpoint} does not answer ({getattr(error, 'reason', error)})"
