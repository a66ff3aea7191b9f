"""Check that the other machines of a hostfile can be reached and match this one.

`connect` queries each of them over ssh, in seconds, before anything is started there.
"""

import contextlib
import itertools
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data_prep.common import children
from data_prep.common.files import sha256_of, strict_json
from data_prep.common.wording import few
from pretrain.checks import capacity
from pretrain.config.run import RunConfig
from pretrain.processes import gpus
from pretrain.records.versions import versions
from pretrain.supervision import hosts, launch
from pretrain.supervision.nodes import Node, addresses

_CHECK_SECONDS = 60.0
_ANSWER = "<<zeroclap {} zeroclap>>"
"""An answer between its marks: logins may print before and after it, and on the same line."""
_PERMANENT = re.compile(
    r"could not resolve hostname [^:]*: (?!temporary failure)|permission denied|"
    r"host key verification failed|identification has changed|"
    r"port \d+: connection refused",  # its ssh listens elsewhere, or does not run
    re.IGNORECASE,
)
"""Errors of ssh that do not go away by waiting."""
_MOST_QUOTED = 200
"""Characters."""


def check_first_machine(names: Sequence[str]) -> None:
    """Check that this machine is the first one of the hostfile.

    Raises:
        ValueError: The first name is not that of this machine.
    """
    own = socket.gethostname()
    if names[0] in (own, own.partition(".")[0]) or _is_local(names[0]):
        return
    raise ValueError(
        f"supervision.hostfile: its first machine is {names[0]}, and this is {own}; start this on "
        f"{names[0]}, or put this machine's line first"
    )


def _is_local(name: str) -> bool:
    """Return whether a name resolves to an address of this machine."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in addresses(name)[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # only own addresses can be bound
                return True
    return False


@children.stop_signals()  # one that ended this process would leave its file
def connect(
    names: Sequence[str],
    config: RunConfig,
    files: Iterable[str] = (),
) -> Node:
    """Check the other machines of a hostfile, all at once, and return this node.

    Args:
        names: the machines, this one first.
        config: of the run, whose folder all of them must have; it need not exist yet.
        files: paths of files that all of them must have, such as manifests of corpora.

    Raises:
        ValueError: A machine is unknown, refuses the login, has other code, files, GPUs or another
            file system, or was not reached in time. The message names it.
    """
    check_first_machine(names)
    if len(names) == 1:
        return Node()
    slots, seconds = config.supervision.processes_per_node, config.supervision.node_wait_seconds
    expected = strict_json([versions(), _hashes(files), gpus.device_type(), slots])
    near, printed = capacity.existing_folder(Path(config.folder)), ""
    deadline = time.monotonic() + seconds
    with tempfile.NamedTemporaryFile("w", prefix=".hosts-", dir=near) as file:
        token = secrets.token_hex(8)
        file.write(token)
        file.flush()
        while True:
            with ThreadPoolExecutor(len(names)) as pool:
                words = itertools.repeat([file.name, token, expected])
                clients, problems = zip(*pool.map(_ask, names[1:], words), strict=True)
            if not (text := few(filter(None, problems), comma="; ")):
                return Node(0, len(names), clients[0])
            if time.monotonic() >= deadline:
                raise ValueError(f"supervision.hostfile: {text}")
            if text != printed:
                printed = text
                print(f"{text}; trying again for up to {seconds:.0f} s", flush=True)
            time.sleep(min(hosts.RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def _ask(name: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Query a machine; return this one's address as it sees it, or why it was not reached yet.

    Raises:
        ValueError: It differs from this machine, or cannot be reached for good.
    """
    words = ("pretrain.supervision.reach", *arguments)
    try:
        done = subprocess.run(
            [*hosts.SSH, *hosts.remote(name, words)],
            input=hosts.variables(os.environ).decode(),
            capture_output=True,
            text=True,
            errors="replace",  # logins may print in any encoding
            timeout=_CHECK_SECONDS,
        )
    except FileNotFoundError as error:
        raise ValueError("supervision.hostfile: no `ssh` on PATH; install OpenSSH") from error
    except subprocess.TimeoutExpired:
        return "", f"{name} did not answer in {_CHECK_SECONDS:.0f} s"
    said = (done.stderr.strip().splitlines() or [f"ssh ended with code {done.returncode}"])[-1]
    if done.returncode == hosts.SSH_FAILED and not _PERMANENT.search(done.stderr):
        return "", f"{name} cannot be reached: {said}"
    if done.returncode:
        raise ValueError(f"supervision.hostfile: {name}: {said}")
    if (found := re.search(_ANSWER.format("(.*)"), done.stdout)) is None:
        printed = done.stdout.strip() or done.stderr.strip()
        raise ValueError(
            f"supervision.hostfile: {name} did not run the command that ssh sent; it printed "
            f"{printed[-_MOST_QUOTED:]!r}. Is a command forced in its authorized_keys?"
        )
    client, difference = json.loads(found[1])
    if difference:
        raise ValueError(f"supervision.hostfile: {name} {difference}")
    return client, ""


def _hashes(files: Iterable[str]) -> dict[str, str]:
    """Return the hash of each file by its path, "" where there is none."""
    return {path: sha256_of(Path(path)) if Path(path).is_file() else "" for path in files}


def _difference(file: Path, content: str, expected: str) -> str:
    """Describe how this machine differs from the one that asks, if it does; see `main`."""
    their_versions, files, device, slots = json.loads(expected)
    if not file.is_file() or file.read_text() != content:
        return (
            f"does not have the folder {file.parent} of this machine; the run's folder must be on "
            "a file system that all machines share"
        )
    try:
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        return f"cannot write to the folder {file.parent}: {error.strerror}"
    for path, digest in _hashes(files).items():
        if digest != files[path]:
            what = "has another copy of" if digest else "does not have"
            return f"{what} {path}; give it the copy of this machine"
    own = versions()
    for what, version in their_versions.items():
        if own.get(what) != version:
            return (
                f"has {what} {own.get(what, 'no')}, and this machine {version}; install the same "
                "environment on all machines"
            )
    try:
        launch.check_device(device)
        gpus.gpus_of(slots, "supervision.hostfile slots")
    except ValueError as error:
        return f"cannot take part: {error}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Print the address of the machine that asks, and how this one differs, as a line of JSON.

    Args:
        arguments: a file in the folder that both should have, its content, and JSON with what the
            machine that asks has: `versions`, `_hashes`, device and slots.
    """
    file, content, expected = arguments
    client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    difference = _difference(Path(file), content, expected)
    sys.stdout.write(_ANSWER.format(strict_json([client, difference])) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
