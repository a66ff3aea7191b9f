"""The nodes of a run: which one this is, and what node 0 knows of the others.

Each node has an agent, and node 0 has the supervisor. The agents write reports to small files in
the run's folder, which all nodes share. A report counts as long as it keeps changing, by the
reader's clock. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pretrain.supervision import control
from pretrain.supervision.decide import CRASH, HANG, Problem

READY, RUNNING, ENDED = "ready", "running", "ended"


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of a run."""

    rank: int = 0
    count: int = 1
    """Number of nodes."""
    address: str = "127.0.0.1"
    """Of node 0."""

    def __post_init__(self) -> None:
        """Refuse a rank that is not below the number of nodes."""
        if not 0 <= self.rank < self.count:
            raise ValueError(
                f"--node-rank {self.rank} with --nodes {self.count}: it must be 0 or above, and "
                "below the number of nodes"
            )


def this_node(
    rank: int | None, count: int | None, address: str | None, environ: Mapping[str, str]
) -> Node:
    """Return this node, from the user's options or from Slurm; by default the only node.

    Slurm's variables count only in a job step with one task on each node.

    Raises:
        ValueError: The rank is not below the number of nodes.
    """
    nodes = environ.get("SLURM_STEP_NUM_NODES", "1")
    if nodes == environ.get("SLURM_STEP_NUM_TASKS") and "SLURM_NODEID" in environ:
        rank = int(environ["SLURM_NODEID"]) if rank is None else rank
        count = int(nodes) if count is None else count
    rank, count = rank or 0, count or 1
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Node(rank, count, address or (host if count > 1 else "127.0.0.1"))


@dataclasses.dataclass(frozen=True)
class Report:
    """The state of an agent's node."""

    token: str
    """Of the attempt; "" before the first."""
    state: str
    """`ready`, `running` or `ended`."""
    problem: str = ""
    """Why its launcher ended, or which of its processes has been stopped for too long."""


def write_report(run: Path, node: int, report: Report) -> None:
    """Write an agent's report, and show that the agent is alive."""
    # The time makes each report different from the one before.
    sender = {"time_ns": time.monotonic_ns(), "pid": os.getpid(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):  # the supervisor notices the silence
        control.replace_json(_path(run, node), {**dataclasses.asdict(report), **sender})


def _path(run: Path, node: int) -> Path:
    return control.folder_of(run) / f"node-{node:03d}.json"


class OtherNodes:
    """What the supervisor on node 0 knows of the other nodes."""

    def __init__(
        self,
        run: Path,
        count: int,
        silence_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without signs of life: a report that already exists may be an old one."""
        self._run, self._silence_seconds, self._clock = run, silence_seconds, clock
        self._reports = {node: control.read_json(_path(run, node)) for node in range(1, count)}
        self._last_change: dict[int, float] = {}
        self._started = clock()

    def _read(self) -> None:
        for node, before in self._reports.items():
            report = control.read_json(_path(self._run, node))
            if report is not None and report != before:
                self._reports[node], self._last_change[node] = report, self._clock()

    def _silent(self) -> list[int]:
        oldest = self._clock() - self._silence_seconds
        return [n for n in self._reports if self._last_change.get(n, self._started) < oldest]

    def unavailable(self) -> list[int]:
        """Return the nodes that cannot start an attempt: silent, or still busy with another."""
        busy = self.busy()
        unknown = self._reports.keys() - self._last_change.keys()
        return sorted({*unknown, *self._silent(), *busy})

    def busy(self) -> list[int]:
        """Return the nodes that are alive and have processes of an attempt."""
        self._read()
        silent = self._silent()
        return [
            node
            for node, report in self._reports.items()
            if report and node not in silent and report["state"] == RUNNING
        ]

    def problem(self, token: str) -> Problem | None:
        """Return why the attempt with this token has to be ended because of another node."""
        self._read()
        if silent := self._silent():
            nodes = ", ".join(map(str, silent))
            return Problem(CRASH, f"node {nodes} was silent for {self._silence_seconds:.0f} s")
        for node, report in self._reports.items():
            if report and report["token"] == token and report["problem"]:
                kind = CRASH if report["state"] == ENDED else HANG
                return Problem(kind, f"node {node}: {report['problem']}")
        return None
