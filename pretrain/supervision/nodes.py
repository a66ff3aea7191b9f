"""The machines of a run: where each agent is, and what the first one knows of the others.

Each machine has an agent, the first leads. The leader's orders and the others' reports are small
files in the run's folder, which all machines share; a report is believed as long as it changes, by
the reader's clock. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pretrain.supervision import control as orders

READY, RUNNING, ENDED = "ready", "running", "ended"


@dataclasses.dataclass(frozen=True)
class Place:
    """Which of how many machines this is."""

    node: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    """Of the first."""

    def __post_init__(self) -> None:
        """Refuse a number that is not below their count."""
        if not 0 <= self.node < self.count:
            raise ValueError(
                f"--node-rank {self.node} with --nodes {self.count}: it must be 0 or above, and "
                "below the number of nodes"
            )


def place(
    node: int | None, count: int | None, address: str | None, environ: Mapping[str, str]
) -> Place:
    """This machine's place: as the user says, else as Slurm does, else the only one.

    Slurm's word is taken below an srun that has one task on each machine.

    Raises:
        ValueError: the number is not below the count.
    """
    nodes = environ.get("SLURM_STEP_NUM_NODES", "1")
    if nodes == environ.get("SLURM_STEP_NUM_TASKS") and "SLURM_NODEID" in environ:
        node = int(environ["SLURM_NODEID"]) if node is None else node
        count = int(nodes) if count is None else count
    node, count = node or 0, count or 1
    here = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Place(node, count, address or (here if count > 1 else "127.0.0.1"))


@dataclasses.dataclass(frozen=True)
class Report:
    """What an agent says of its machine."""

    token: str
    """Of the order that it speaks of; "" before the first."""
    state: str
    """ready, running or ended."""
    reason: str = ""
    """Why its launcher ended."""
    stopped: str = ""
    """Which of its processes has been stopped for too long."""


class Reporter:
    """An agent's side."""

    def __init__(self, run: Path, node: int) -> None:
        """Say nothing yet."""
        self._path, self._count = _path(run, node), 0

    def tell(self, report: Report) -> None:
        """Say it, and that we live."""
        self._count += 1
        signs = {"count": self._count, "pid": os.getpid(), "host": socket.gethostname()}
        with contextlib.suppress(OSError):  # the leader counts the silence
            orders.write_quickly(self._path, {**dataclasses.asdict(report), **signs})


def _path(run: Path, node: int) -> Path:
    return orders.folder_of(run) / f"node-{node:03d}.json"


class Others:
    """The leader's side: all machines but its own."""

    def __init__(
        self,
        run: Path,
        count: int,
        silence_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Have heard nothing yet: a report that lies there already may be anyone's."""
        self._run, self._silence, self._clock = run, silence_seconds, clock
        self._newest = {node: orders.read_json(_path(run, node)) for node in range(1, count)}
        self._heard: dict[int, float] = {}
        self._began = clock()

    def look(self) -> None:
        """Read all reports."""
        for node, before in self._newest.items():
            now = orders.read_json(_path(self._run, node))
            if now is not None and now != before:
                self._newest[node], self._heard[node] = now, self._clock()

    def _silent(self) -> list[int]:
        now = self._clock()
        return [
            node
            for node in self._newest
            if now - self._heard.get(node, self._began) > self._silence
        ]

    def missing(self) -> list[int]:
        """Machines that cannot be given an attempt: not heard, or not yet rid of the last one."""
        unheard = {node for node in self._newest if node not in self._heard}
        return sorted(unheard | {*self._silent()} | {*self.busy()})

    def busy(self) -> list[int]:
        """Machines that live and run an attempt."""
        silent = self._silent()
        return [
            node
            for node, report in self._newest.items()
            if report and node not in silent and report["state"] == RUNNING
        ]

    def stopped(self, token: str) -> str:
        """Which process of the attempt with this token is stopped on another machine."""
        for node, report in self._newest.items():
            if report and report["token"] == token and report.get("stopped"):
                return f"on node {node} {report['stopped']}"
        return ""

    def complaint(self, token: str) -> str:
        """Why the attempt with this token cannot go on, where another machine is to blame."""
        silent = self._silent()
        if silent:
            return f"node {', '.join(map(str, silent))} was not heard for {self._silence:.0f} s"
        for node, report in self._newest.items():
            if report and report["token"] == token and report["state"] == ENDED:
                return f"node {node} ended: {report['reason']}"
        return ""
