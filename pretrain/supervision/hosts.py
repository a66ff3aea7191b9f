"""The machines of a hostfile: read it, and keep an agent running on each of them over ssh.

The supervisor runs on the first machine. The agents on the others are those that a user may start
with --node-rank instead: they follow the control file and end their processes by themselves, so ssh
only starts them. `pretrain.supervision.reach` checks the machines first.
"""

import dataclasses
import math
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil

from data_prep.common import children
from data_prep.common.files import named_errors, strict_json
from data_prep.common.wording import few
from pretrain.config.run import RunConfig
from pretrain.processes import launching
from pretrain.supervision import nodes
from pretrain.supervision.nodes import Node

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
SSH_FAILED = 255
"""Exit code of ssh if it could not connect; any other is that of the command on the machine."""
_WITH_VARIABLES = (
    "import json, os, sys; os.environ.update(json.load(sys.stdin)); "
    "os.execv(sys.executable, [sys.executable, '-u', '-m', *sys.argv[1:]])"
)
RETRY_SECONDS = 5.0
_ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
_EXPORTED = re.compile(
    # DeepSpeed 0.19.8 exports the first five (EXPORT_ENVS in launcher/runner.py, export_envs of its
    # accelerators); the others decide on devices, connections, caches and threads.
    r"MLFLOW|MV2|NCCL|PYTHON|UCX|GLOO|TORCH|PYTORCH_|TRITON_|DEEPSPEED_|FI_|"
    r"CUDA_VISIBLE_DEVICES$|DS_ACCELERATOR$|OMP_NUM_THREADS$"
)


def read_hostfile(path: str) -> tuple[list[str], int]:
    """Return the names of the machines in a hostfile, and the slots that each of them has.

    Raises:
        ValueError: The file cannot be read, names no machine or one twice, has a line that is not
            `NAME slots=NUMBER`, or machines with different numbers of slots.
    """
    setting = f"supervision.hostfile: {path}"
    slots: dict[str, int] = {}
    if not Path(path).is_file():
        raise ValueError(f"{setting}: no such file")
    with named_errors(f"{setting}: is not UTF-8"):
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    for line in lines:
        if not (words := line.partition("#")[0].split()):
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
    if others := [name for name in slots if slots[name] != count]:
        raise ValueError(
            f"{setting}: {others[0]} has {slots[others[0]]} slots and {first} has {count}; give "
            "every machine the same number"
        )
    return list(slots), count


def resolve(config: RunConfig, node: Node) -> tuple[RunConfig, list[str]]:
    """Return the recipe with the slots of its hostfile as ranks for each node, and the machines.

    Args:
        config: the recipe.
        node: this node, as the user or Slurm described it.

    Raises:
        ValueError: The hostfile is not valid (see `read_hostfile`), or the user starts agents as
            well.
    """
    settings = config.supervision
    if not settings.hostfile:
        return config, []
    names, slots = read_hostfile(settings.hostfile)
    if node.count > 1:
        raise ValueError(
            f"--nodes {node.count} with supervision.hostfile, whose agents are started over ssh; "
            "start one supervisor without --nodes, or an agent on each node without that setting"
        )
    settings = dataclasses.replace(settings, processes_per_node=slots)
    return dataclasses.replace(config, supervision=settings), names


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the other machines get: `_EXPORTED`, and the user's own.

    The user's own are those in the file that DS_ENV_FILE names, by default `.deepspeed_env`, in the
    home folder and in this one, as for the deepspeed launcher.
    """
    found = {name: value for name, value in environ.items() if _EXPORTED.match(name)}
    for folder in (Path.home(), Path()):
        file = folder / environ.get("DS_ENV_FILE", ".deepspeed_env")
        with named_errors(f"{file}: is not UTF-8"):
            lines = file.read_text(encoding="utf-8-sig").splitlines() if file.is_file() else []
        pairs = (line.partition("=") for line in lines if "=" in line)
        found |= {name.strip(): value.strip() for name, _, value in pairs}
    return found


def remote(name: str, words: Sequence[str]) -> list[str]:
    """Return ssh's last arguments: a machine, and the command that runs a Python module there.

    The module reads its environment from standard input (`variables`), because every user of a
    machine can read the arguments of its processes.
    """
    command = shlex.join([sys.executable, "-I", "-c", _WITH_VARIABLES, *words])
    return ["--", name, f"cd {shlex.quote(os.getcwd())} && exec {command}"]


def variables(environ: Mapping[str, str]) -> bytes:
    """Return the standard input for `remote`: the `exported` variables, as JSON."""
    return strict_json(exported(children.environment(environ))).encode()


class Agents:
    """The agents on the other machines of a hostfile, each started by a local ssh process."""

    def __init__(self, names: Sequence[str], run: Path, write: Callable[[str], object]) -> None:
        """Prepare without starting an agent.

        Args:
            names: the machines, this one first; empty if others start the agents.
            run: the run's folder.
            write: receives messages, without line ends, about agents that could not be started.
        """
        self.start = secrets.token_hex(8)
        """Token of this start: the agents serve its supervisor only."""
        self._names, self._run, self._write = names, run, write
        self._children: dict[int, psutil.Popen] = {}
        self._started: dict[int, float] = {}
        self._begins: dict[int, int] = {}  # of the newest ssh, in the log of all
        self._printed: dict[int, str] = {}

    def _log(self, node: int) -> Path:
        return self._run / "logs" / f"agent-{node:03d}.log"

    def keep(self, others: nodes.OtherNodes) -> None:
        """Start an agent on each node where our last ssh has ended.

        A new agent ends one that still runs there, such as that of an earlier supervisor, and takes
        over its ranks.

        Args:
            others: state of the nodes. The ssh of silent ones is ended: its agent is stuck.

        Raises:
            OSError: The log cannot be written now.
        """
        for node in range(1, len(self._names)):
            child = self._children.get(node)
            seconds = time.monotonic() - self._started.get(node, -math.inf)
            if seconds < RETRY_SECONDS:
                continue
            if child and child.poll() is None:
                if node not in others.silent() or seconds < nodes.SILENCE_SECONDS:
                    continue
                text = f"the agent on {self._names[node]} does not report; starting another"
                self._write(f"{text}: {self._last_line(node)}")
                child.kill()
                child.wait()
            elif child:
                self._report(node, child.returncode)
            self._started[node] = time.monotonic()
            others.replace(node)
            self._start(node)

    def _start(self, node: int) -> None:
        run = str(self._run.absolute())  # an agent ends others of the same words
        words = ("pretrain.supervision.agent", run, str(node), self.start)
        log = self._log(node)
        log.parent.mkdir(exist_ok=True)
        # In memory: with a full /tmp no agent would be started.
        with log.open("ab") as file, open(os.memfd_create("variables"), "w+b") as given:
            given.write(variables(os.environ))
            given.seek(0)
            self._begins[node] = file.tell()
            self._children[node] = psutil.Popen(
                [*SSH, *_ALIVE, *remote(self._names[node], words)],
                stdin=given,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the supervisor
            )

    def _report(self, node: int, code: int) -> None:
        """Print why an ssh ended, unless it was printed before."""
        text = f"the agent on {self._names[node]} ended with code {code}"
        if code == SSH_FAILED:  # with any message: a booting machine may refuse connections
            text = f"{self._names[node]} cannot be reached"
        if (text := f"{text}: {self._last_line(node)}") != self._printed.get(node):
            self._write(f"{text}; trying again")
            self._printed[node] = text

    def _last_line(self, node: int) -> str:
        """Return what the newest ssh of a node, or its agent, printed last."""
        line = launching.tail(self._log(node), 1, self._begins[node]).strip()
        return line or "nothing was printed"

    def last_lines(self, silent: Collection[int]) -> str:
        """Return what the agents on these nodes printed last, if they are ours."""
        ours = {self._names[node]: node for node in silent if node in self._begins}
        said = (f"; {name} printed last: {self._last_line(node)}" for name, node in ours.items())
        return few(said, comma="")

    def close(self, seconds: float) -> None:
        """Give the agents, which were told to exit, this time to do so."""
        for child in psutil.wait_procs(self._children.values(), seconds)[1]:
            child.terminate()
            child.wait()
