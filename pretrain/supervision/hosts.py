"""The machines of a hostfile: read it, check the machines over ssh, keep an agent running on each.

The supervisor runs on the first machine. The agents on the others are those that a user may start
with --node-rank instead: they follow the control file, and end their processes by themselves. So
ssh only has to start them. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from data_prep.files import strict_json
from pretrain.config.run import RunConfig
from pretrain.supervision import capacity, launch, nodes
from pretrain.supervision.nodes import Node, OtherNodes

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
_SSH_FAILED = 255
"""Exit code of ssh if it could not connect; any other is that of the command on the machine."""
_NEVER = re.compile(
    r"could not resolve|permission denied|host key verification failed|identification has changed",
    re.IGNORECASE,
)
"""What ssh says of a machine that will not be reached by waiting."""
_CHECK_SECONDS, _RETRY_SECONDS = 60.0, 5.0
_NO_AGENT_SECONDS = 2.0
"""Silence after which an agent is started on a machine. A new supervisor waits as long for the
agents of the one before."""
_PACKAGES = ("torch", "deepspeed", "numpy")
"""Ranks with other versions of these compute other numbers, or do not understand each other."""
_EXPORTED = re.compile(
    # DeepSpeed 0.19.8 exports the first five (EXPORT_ENVS in launcher/runner.py, export_envs of its
    # accelerators); the others decide on devices, connections and threads.
    r"MLFLOW|MV2|NCCL|PYTHON|UCX|GLOO|CUDA_VISIBLE_DEVICES$|DS_ACCELERATOR$|OMP_NUM_THREADS$"
)


def read(path: str) -> tuple[list[str], int]:
    """Return the names of the machines in a hostfile, and the slots that each of them has.

    Raises:
        ValueError: The file cannot be read, names no machine or one twice, has a line that is not
            `NAME slots=NUMBER`, or machines with different numbers of slots.
    """
    setting = f"supervision.hostfile: {path}"
    text = Path(path).read_text(encoding="utf-8") if Path(path).is_file() else ""
    slots: dict[str, int] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        number = re.fullmatch(r"slots=([1-9]\d*)", words[1]) if len(words) == 2 else None
        if number is None:
            raise ValueError(f"{setting}: {line!r} is not of the form `gpu-1 slots=8`")
        if words[0] in slots:
            raise ValueError(f"{setting} names {words[0]} twice; write one line for each machine")
        slots[words[0]] = int(number[1])
    if not slots:
        raise ValueError(f"{setting} names no machine; it needs lines such as `gpu-1 slots=8`")
    first, count = next(iter(slots.items()))
    for name, other in slots.items():
        if other != count:
            raise ValueError(
                f"{setting}: {name} has {other} slots and {first} has {count}; give every machine "
                "the same number"
            )
    return list(slots), count


def resolve(config: RunConfig, node: Node) -> tuple[RunConfig, list[str]]:
    """Return the recipe with the slots of its hostfile as ranks for each node, and the machines.

    Args:
        config: the recipe.
        node: this node, as the user or Slurm described it.

    Raises:
        ValueError: The hostfile is not valid (see `read`), or the user starts agents as well.
    """
    settings = config.supervision
    if not settings.hostfile:
        return config, []
    names, slots = read(settings.hostfile)
    if node.count > 1:
        raise ValueError(
            f"--nodes {node.count} with supervision.hostfile, whose agents are started over ssh; "
            "start one supervisor without --nodes, or an agent on each node without that setting"
        )
    settings = dataclasses.replace(settings, processes_per_node=slots)
    return dataclasses.replace(config, supervision=settings), names


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


# --- checking the machines --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a machine says of itself."""

    versions: dict[str, str]
    """Of Python and packages."""
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
            time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


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
    words = ("pretrain.supervision.hosts", file)
    try:
        done = subprocess.run(
            [*_SSH, *_remote(name, words, os.environ)],
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
    if done.returncode == _SSH_FAILED and not _NEVER.search(done.stderr):
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


def versions() -> dict[str, str]:
    """Return this machine's versions of Python and of the packages that must not differ."""
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "no"
    return found


def main(arguments: Sequence[str]) -> int:
    """Answer on another machine, in a line of JSON; the argument is the file to look for."""
    file = Path(arguments[0])
    seen = file.read_text() if file.is_file() else ""
    client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    answer = Answer(versions(), seen, client)
    sys.stdout.write(strict_json(dataclasses.asdict(answer)) + "\n")
    return 0


# --- starting agents --------------------------------------------------------------------------


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the other machines get: `_EXPORTED`, and the user's own.

    The user's own are those in the file that DS_ENV_FILE names, by default `.deepspeed_env`, in the
    home folder and in this one, as for the deepspeed launcher.
    """
    found = {name: value for name, value in environ.items() if _EXPORTED.match(name)}
    for folder in (Path.home(), Path()):
        file = folder / environ.get("DS_ENV_FILE", ".deepspeed_env")
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        pairs = (line.partition("=") for line in lines if "=" in line)
        found |= {name.strip(): value.strip() for name, _, value in pairs}
    return found


def _remote(name: str, words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return ssh's last arguments: a machine, and how it runs a Python module as this one does."""
    variables = [f"{key}={value}" for key, value in exported(environ).items()]
    command = shlex.join(["env", *variables, sys.executable, "-u", "-m", *words])
    return ["--", name, f"cd {shlex.quote(os.getcwd())} && exec {command}"]


class Agents:
    """The agents on the other machines of a hostfile; each is the child of an ssh of ours."""

    def __init__(
        self,
        names: Sequence[str],
        run: Path,
        write: Callable[[str], object],
        module: str = "",
    ) -> None:
        """Start none yet.

        Args:
            names: the machines, this one first; empty if others start the agents.
            run: the run's folder.
            write: receives messages, without line ends, about agents that could not be started.
            module: what each rank runs; "" for an attempt.
        """
        self._names, self._run, self._write = names, run, write
        self._module = module or launch.MODULE
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[int, float] = {}
        self._printed: dict[int, str] = {}
        self._closed = False

    def _log(self, node: int) -> Path:
        return self._run / "logs" / f"agent-{node:03d}.log"

    def keep(self, silent: Collection[int]) -> None:
        """Start an agent on each of these nodes, unless our last ssh still runs there.

        Raises:
            OSError: The log cannot be written now.
        """
        for node in silent:
            child = self._children.get(node)
            if self._closed or not self._names or (child and child.poll() is None):
                continue
            if time.monotonic() - self._started.get(node, -_RETRY_SECONDS) < _RETRY_SECONDS:
                continue
            if child:
                self._report(node, child.returncode)
            self._started[node] = time.monotonic()
            numbers = str(node), str(len(self._names))
            words = ("pretrain.supervision.agent", str(self._run), *numbers, self._module)
            log = self._log(node)
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                self._children[node] = subprocess.Popen(
                    [*_SSH, *_ALIVE, *_remote(self._names[node], words, os.environ)],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the supervisor
                )

    def _report(self, node: int, code: int) -> None:
        """Say why an ssh ended, if that is news."""
        lines = self._log(node).read_text(errors="replace").splitlines() or [""]
        text = f"the agent on {self._names[node]} ended with code {code}"
        if code == _SSH_FAILED:
            text = f"{self._names[node]} cannot be reached"
        text = f"{text}: {lines[-1]}"
        if text != self._printed.get(node):
            self._write(f"{text}; trying again")
            self._printed[node] = text

    @contextlib.contextmanager
    def kept(self, others: OtherNodes) -> Iterator[None]:
        """Show the agents of the other nodes that node 0 is alive, and start those of ours.

        A thread does so until this block ends.
        """

        def act() -> None:
            nodes.show_life(self._run)
            with contextlib.suppress(OSError):  # tried again in a second
                self.keep(others.silent(_NO_AGENT_SECONDS))

        with nodes.repeated(1.0, act) if others.count else contextlib.nullcontext():
            yield

    def close(self, seconds: float) -> None:
        """Start no more agents, and give those that run this time to exit as they were told."""
        self._closed = True
        deadline = time.monotonic() + seconds
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.terminate()
                child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
