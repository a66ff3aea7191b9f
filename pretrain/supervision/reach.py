"""Check that the other machines of a hostfile can be reached and match this one.

`connect` queries each of them over ssh, in seconds, before anything is started there.
"""

from __future__ import annotations

import dataclasses
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data_prep import manifest
from data_prep.common.files import sha256_of, strict_json
from pretrain.checks import capacity
from pretrain.records.versions import versions
from pretrain.supervision import hosts
from pretrain.supervision.nodes import Node

_CHECK_SECONDS = 60.0
_MARKS = "<<zeroclap ", " zeroclap>>"
"""Delimiters of an answer: logins may print before and after it, and on the same line."""
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
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)  # only own addresses can be bound
    except OSError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Answer:
    """A machine's description of itself."""

    versions: dict[str, str]
    """See `pretrain.records.versions`."""
    seen: str
    """Content of the requested file; "" if it does not have it."""
    corpora: dict[str, str]
    """Hash of each corpus's manifest by the corpus's path; "" if it does not have it."""
    unwritable: str = ""
    """Why it cannot write beside that file; "" if it can."""
    client: str = ""
    """Address of this machine, as the other one sees it."""


def connect(
    names: Sequence[str],
    run: Path,
    wait_seconds: float,
    write: Callable[[str], object],
    corpora: Iterable[str] = (),
) -> Node:
    """Check the other machines of a hostfile, all at once, and return this node.

    Args:
        names: the machines, this one first.
        run: the run's folder, which all of them must have; it need not exist yet.
        wait_seconds: how long to wait for machines that cannot be reached.
        write: receives messages, without line ends.
        corpora: paths of corpora, which all of them must have.

    Raises:
        ValueError: A machine is unknown, refuses the login, has other code, another corpus or
            another file system, or was not reached in time. The message names it.
    """
    check_first_machine(names)
    if len(names) == 1:
        return Node()
    near, own = capacity.existing_folder(run), _hashes(corpora)
    missing, answers = {name: "" for name in names[1:]}, dict[str, Answer]()
    deadline, printed = time.monotonic() + wait_seconds, ""
    with tempfile.NamedTemporaryFile("w", prefix=".hosts-", dir=near) as file:
        token = secrets.token_hex(8)
        file.write(token)
        file.flush()
        while True:
            with ThreadPoolExecutor(len(missing)) as pool:
                found = pool.map(_ask, missing, itertools.repeat([file.name, *own]))
                results = dict(zip(missing, found, strict=True))
            missing = {name: text for name, text in results.items() if isinstance(text, str)}
            for name, answer in results.items():
                if isinstance(answer, Answer):
                    _check_machine(name, answer, Answer(versions(), token, own), near)
                    answers[name] = answer
            if not missing:
                return Node(0, len(names), answers[names[1]].client)
            text = "; ".join(missing.values())
            if time.monotonic() >= deadline:
                raise ValueError(f"supervision.hostfile: {text}")
            if text != printed:
                printed = text
                write(f"{text}; trying again for up to {wait_seconds:.0f} s")
            time.sleep(min(hosts.RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def _ask(name: str, arguments: Sequence[str]) -> Answer | str:
    """Query a machine; return why it was not reached if that may change.

    Raises:
        ValueError: A permanent error.
    """
    words = ("pretrain.supervision.reach", *arguments)
    try:
        done = subprocess.run(
            [*hosts.SSH, *hosts.remote(name, words)],
            input=hosts.variables(os.environ).decode(),
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
        )
    except FileNotFoundError as error:
        raise ValueError("supervision.hostfile: no `ssh` on PATH; install OpenSSH") from error
    except subprocess.TimeoutExpired:
        return f"{name} did not answer in {_CHECK_SECONDS:.0f} s"
    said = (done.stderr.strip().splitlines() or [f"ssh ended with code {done.returncode}"])[-1]
    if done.returncode == hosts.SSH_FAILED and not hosts.is_permanent(done.stderr):
        return f"{name} cannot be reached: {said}"
    if done.returncode:
        raise ValueError(f"supervision.hostfile: {name}: {said}")
    first, last = map(re.escape, _MARKS)
    if (found := re.search(f"{first}(.*){last}", done.stdout)) is None:
        printed = done.stdout.strip() or done.stderr.strip()
        raise ValueError(
            f"supervision.hostfile: {name} did not run the command that ssh sent; it printed "
            f"{printed[-_MOST_QUOTED:]!r}. Is a command forced in its authorized_keys?"
        )
    return Answer(**json.loads(found[1]))


def _check_machine(name: str, answer: Answer, own: Answer, folder: Path) -> None:
    """Raise ValueError if a machine's answers differ from those of this one."""
    who, where = f"supervision.hostfile: {name}", folder.resolve()
    if answer.seen != own.seen:
        raise ValueError(
            f"{who} does not have the folder {where} of this machine; the run's folder must be on "
            "a file system that all machines share"
        )
    if answer.unwritable:
        raise ValueError(f"{who} cannot write to the folder {where}: {answer.unwritable}")
    for path, digest in own.corpora.items():
        if answer.corpora[path] != digest:
            what = "has another corpus at" if answer.corpora[path] else "does not have the corpus"
            raise ValueError(f"{who} {what} {path}; give it the corpus that this machine has")
    for what, version in own.versions.items():
        if (other := answer.versions.get(what, "no")) != version:
            raise ValueError(
                f"{who} has {what} {other}, and this machine {version}; install the same "
                "environment on all machines"
            )


def _hashes(corpora: Iterable[str]) -> dict[str, str]:
    """Return the hash of each corpus's manifest by the corpus's path, "" where there is none."""
    files = {path: Path(path) / manifest.FILE_NAME for path in corpora}
    return {path: sha256_of(file) if file.is_file() else "" for path, file in files.items()}


def main(arguments: Sequence[str]) -> int:
    """Print this machine's answer to `connect` as a line of JSON.

    Args:
        arguments: the file to look for, and the paths of corpora.
    """
    file, unwritable = Path(arguments[0]), ""
    seen = file.read_text() if file.is_file() else ""
    try:
        if seen:
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        unwritable = str(error.strerror)
    client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    answer = Answer(versions(), seen, _hashes(arguments[1:]), unwritable, client)
    sys.stdout.write(strict_json(dataclasses.asdict(answer)).join(_MARKS) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
