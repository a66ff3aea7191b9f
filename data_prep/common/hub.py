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
    except Exception as error:  # also of its client, where a connection breaks
        what, *_ = str(error).splitlines() or [type(error).__name__]
        hub = "not in the hub's cache" if local else "not to be had from the Hugging Face hub"
        # The library's further sentences name arguments of its functions.
        raise ValueError(f"no such file here, and {hub}: {what.partition('. ')[0]}") from error


def stay_offline_if_silent() -> None:
    """Make the libraries of the hub use their caches alone if it does not answer; say so, once.

    Call it before datasets is imported, which reads the setting then.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:  # any answer is one, also that of a mirror without a page at its root
        get_session().head(constants.ENDPOINT, timeout=_SECONDS, follow_redirects=False)
    except Exception as error:  # of the library's own client, which knows proxies and certificates
        silence = f"{constants.ENDPOINT} does not answer ({error})"
        uses = "using only what was downloaded before"
        print(f"note: {silence}; {uses}", file=sys.stderr, flush=True)
        constants.HF_HUB_OFFLINE = True
