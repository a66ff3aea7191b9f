"""Whether the other machines of a hostfile can be reached and are like this one.

`connect` asks each of them over ssh, in seconds, before anything is started there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data_prep.common.files import strict_json
from pretrain.checks import capacity
from pretrain.records.versions import versions
from pretrain.supervision import hosts
from pretrain.supervision.nodes import Node

_NEVER = re.compile(
    r"could not resolve|permission denied|host key verification failed|identification has changed",
    re.IGNORECASE,
)
"""What ssh says of a machine that will not be reached by waiting."""
_CHECK_SECONDS = 60.0


def refuse_elsewhere(names: Sequence[str]) -> None:
    """Refuse to supervise from another machine than the first one of the hostfile.

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
    """What a machine says of itself."""

    versions: dict[str, str]
    """See `pretrain.records.versions`."""
    seen: str
    """Content of the file that it was asked for; "" if it does not have it."""
    client: str = ""
    """The address from which it was asked: this machine's, as the other one sees it."""


class _Unreachable(Exception):
    """A machine that may be reached later."""


def connect(
    names: Sequence[str], run: Path, wait_seconds: float, write: Callable[[str], object]
) -> Node:
    """Check the other machines of a hostfile, all at once, and return this node.

    Args:
        names: the machines, this one first.
        run: the run's folder, which all of them must have; it need not exist yet.
        wait_seconds: how long to wait for machines that cannot be reached.
        write: receives messages, without line ends.

    Raises:
        ValueError: A machine is unknown, does not let us in, has another Python, another version of
            a package or another file system, or was not reached in time. The message names it.
    """
    refuse_elsewhere(names)
    if len(names) == 1:
        return Node()
    near = capacity.existing_folder(run)
    deadline, printed = time.monotonic() + wait_seconds, ""
    with tempfile.NamedTemporaryFile("w", prefix=".hosts-", dir=near) as file:
        token = secrets.token_hex(8)
        file.write(token)
        file.flush()
        while True:
            answers, missing = _ask_all(names[1:], file.name)
            for name, answer in answers.items():
                _refuse_different(name, answer, token, near)
            if not missing:
                return Node(0, len(names), next(iter(answers.values())).client)
            if time.monotonic() >= deadline:
                raise ValueError(f"supervision.hostfile: {missing}")
            if missing != printed:
                printed = missing
                write(f"{missing}; trying again for up to {wait_seconds:.0f} s")
            time.sleep(min(hosts.RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def _ask_all(names: Sequence[str], file: str) -> tuple[dict[str, Answer], str]:
    """Ask machines about themselves; return their answers, and which could not be reached."""

    def ask(name: str) -> Answer | str:
        try:
            return _ask(name, file)
        except _Unreachable as error:
            return str(error)

    with ThreadPoolExecutor(len(names)) as pool:
        results = dict(zip(names, pool.map(ask, names), strict=True))
    answers = {name: result for name, result in results.items() if isinstance(result, Answer)}
    return answers, "; ".join(result for result in results.values() if isinstance(result, str))


def _ask(name: str, file: str) -> Answer:
    """Ask a machine about itself.

    Raises:
        ValueError: It will not answer, however long one waits.
        _Unreachable: It may be reached later.
    """
    words = ("pretrain.supervision.reach", file)
    try:
        done = subprocess.run(
            [*hosts.SSH, *hosts.remote(name, words, os.environ)],
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise ValueError("supervision.hostfile: no `ssh` on PATH; install OpenSSH") from error
    except subprocess.TimeoutExpired:
        raise _Unreachable(f"{name} did not answer in {_CHECK_SECONDS:.0f} s") from None
    said = (done.stderr.strip().splitlines() or [f"ssh ended with code {done.returncode}"])[-1]
    if done.returncode == hosts.SSH_FAILED and not _NEVER.search(done.stderr):
        raise _Unreachable(f"{name} cannot be reached: {said}")
    if done.returncode:
        raise ValueError(f"supervision.hostfile: {name}: {said}")
    return Answer(**json.loads(done.stdout.splitlines()[-1]))  # a login may print lines before


def _refuse_different(name: str, answer: Answer, token: str, folder: Path) -> None:
    if answer.seen != token:
        raise ValueError(
            f"supervision.hostfile: {name} does not have the folder {folder.resolve()} of this "
            "machine; the run's folder must be on a file system that all machines share"
        )
    for what, own in versions().items():
        if (other := answer.versions.get(what, "no")) != own:
            raise ValueError(
                f"supervision.hostfile: {name} has {what} {other}, and this machine {own}; install "
                "the same environment on all machines"
            )


def main(arguments: Sequence[str]) -> int:
    """Answer on another machine, in a line of JSON; the argument is the file to look for."""
    file = Path(arguments[0])
    seen = file.read_text() if file.is_file() else ""
    client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    answer = Answer(versions(), seen, client)
    sys.stdout.write(strict_json(dataclasses.asdict(answer)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
