"""Versions of the running code: Python, the packages that compute, and zeroclap itself.

Ranks with different code compute different numbers, or fail to communicate. A release number does
not tell two checkouts apart, so zeroclap's version is a hash of its source files.
"""

import functools
import hashlib
import itertools
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from data_prep.common import wording
from data_prep.common.files import sha256_of, strict_json
from pretrain.records.collective import Failure, Gather
from pretrain.records.ledger import Record

ROOT = Path(__file__).parents[2]
FOLDERS = ("data_prep", "pretrain")
"""Beside each other, wherever this process imports them from."""
_PACKAGES = ("torch", "deepspeed", "numpy", "tokenizers")


@functools.cache
def sources() -> dict[str, str]:
    """Return the hash of every source file of the packages that ranks import, by path."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("[!.]*.py"))
    return {str(path.relative_to(ROOT)): sha256_of(path) for path in paths}


def versions() -> dict[str, str]:
    """Return this process's versions by name: of zeroclap, Python and packages; "no" if missing."""
    own = f"source hash {hashlib.sha256(repr(sources()).encode()).hexdigest()[:12]}"
    found = {"zeroclap": own, "Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "no"
    return found


def differences(found: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Describe what differs between hosts: `torch: 2.13 on a, b and 2.12 on c`.

    Args:
        found: versions by name, or hashes of files by path, each with the host that has them.
    """
    pairs, described = list(found), []
    for name in dict.fromkeys(name for _, values in pairs for name in values):
        hosts: dict[str, dict[str, None]] = {}  # by version
        for host, values in pairs:
            hosts.setdefault(values.get(name, "no"), {})[host] = None
        if len(hosts) > 1:
            parts = (f"{version} on {wording.few(where)}" for version, where in hosts.items())
            described.append(f"{name}: {' and '.join(parts)}")
    return described


def check_same(gather: Gather, settings: Mapping[str, Any]) -> dict[str, str]:
    """Check that all ranks run the same code with the same settings; return the versions.

    Args:
        gather: among all ranks.
        settings: this rank's, and hashes of files, by name; its host may have its own copies.

    Raises:
        Failure: On every rank, if any differs; the message names the hosts, and a source file or
            the values.
    """
    own, host = versions(), socket.gethostname()
    if wrong := differences(gather((host, own))):
        files = differences(gather((host, sources())))
        which = f" ({files[0].partition(':')[0]} differs)" if files else ""
        raise Failure(
            f"not all ranks run the same code: {'; '.join(wrong)}{which}; install the same "
            "environment on all machines"
        )
    values = {name: strict_json(value) for name, value in settings.items()}
    if wrong := differences(gather((host, values))):
        raise Failure(f"not all ranks have the same settings or files: {'; '.join(wrong)}")
    return own


def changes(records: Sequence[Record]) -> list[str]:
    """Return a sentence for each attempt of a ledger whose code differs from the one before."""
    attempts = [r for r in records if r["kind"] == "attempt" and "versions" in r]
    found = []
    for before, after in itertools.pairwise(attempts):
        differing = wording.changes(before["versions"], after["versions"])
        changed = [f"{name} {was or 'no'} to {now or 'no'}" for name, was, now in differing]
        if changed:
            numbers = f"between attempts {before['attempt']} and {after['attempt']}"
            found.append(f"code changed {numbers}: {', '.join(changed)}")
    return found
