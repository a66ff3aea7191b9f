"""The nodes of a run: which one this is, and how node 0 and the others monitor each other.

Each node has an agent, and node 0 has the supervisor. An agent sends its reports to a port of node
0. The supervisor renews its lock's file in the run's folder, which all nodes share. An agent is
alive while its reports arrive, the supervisor while that file changes, by the clock of who reads
them.
"""

import contextlib
import dataclasses
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.common import files
from data_prep.common.records import check_value
from data_prep.common.wording import few
from pretrain.records import control, heartbeat
from pretrain.records.folder import SUPERVISOR_LOCK, sign_of
from pretrain.supervision.decide import CRASH, HANG, Problem

READY, RUNNING, ENDED, REFUSED = "ready", "running", "ended", "refused"
_CONNECT_SECONDS, _RECEIVE_SECONDS = 5.0, 0.2
_MAX_REPORT = 1 << 16
"""Bytes that are read from a connection."""
SILENCE_SECONDS = 60.0
"""The death of another node's agent, or of node 0, is noticed within this time."""
QUIET_SECONDS = 6.0
"""Between two heartbeats of a node whose report is unchanged; each is a connection."""
MAX_PAUSE = 10.0
"""Seconds between two checks. If more have passed, this process was stopped, perhaps with its
ranks, as by a scheduler that suspends a job."""


class Interval:
    """Decides when a repeated action is due: at once, and then again after some seconds."""

    def __init__(self) -> None:
        """Due now."""
        self._last = -math.inf

    def due(self, seconds: float) -> bool:
        """Return whether the last time due is this long ago; if so, restart the interval."""
        now = time.monotonic()
        if now - self._last < seconds:
            return False
        self._last = now
        return True


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of a run."""

    rank: int = 0
    count: int = 1
    """Number of nodes."""
    address: str = "127.0.0.1"
    """Of node 0."""

    def __post_init__(self) -> None:
        """Check the rank."""
        accepted = f"0 or above, and below --nodes {self.count}"
        check_value("--node-rank", self.rank, 0 <= self.rank < self.count, accepted)


def this_node(
    rank: int | None, count: int | None, address: str | None, environ: Mapping[str, str]
) -> Node:
    """Return this node, from the user's options or from Slurm; by default the only node.

    Slurm's variables count only in a job step with one task on each node.

    Raises:
        ValueError: The rank is not below the number of nodes, or the address of node 0 is unknown.
    """
    if address and not rank:  # torch connects to it on node 0, too
        accepted = "a name or an address that this machine knows"
        check_value("--master-addr", address, bool(addresses(address)), accepted)
    nodes = environ.get("SLURM_STEP_NUM_NODES", "1")
    if nodes == environ.get("SLURM_STEP_NUM_TASKS") and "SLURM_NODEID" in environ:
        rank = int(environ["SLURM_NODEID"]) if rank is None else rank
        count = int(nodes) if count is None else count
    rank, count = rank or 0, 1 if count is None else count
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Node(rank, count, address or (host if count > 1 else "127.0.0.1"))


def addresses(name: str) -> list[tuple[Any, ...]]:
    """Return what `socket.getaddrinfo` knows of a machine's name or address; nothing if unknown."""
    try:
        return list(socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM))
    except (OSError, UnicodeError):  # of a name such as `a..b`
        return []


@dataclasses.dataclass(frozen=True)
class Report:
    """The state of an agent's node."""

    token: str
    """Of the attempt; "" before the first."""
    state: str
    """`ready`, `running`, `ended`, or `refused` if the node cannot take part at all."""
    problem: str = ""
    """Why its launcher ended, why it is refused, or which process is stopped."""
    start: str = ""
    """Token of the supervisor's start that this agent serves; "" if it serves any."""


class Reporter:
    """Sends the reports of a node to node 0, which shows that the node is alive.

    A node that cannot connect to node 0 could not train with it either; one that cannot write to
    the run's folder can say so.
    """

    def __init__(self, run: Path, node: int) -> None:
        """Prepare the reports of a node without sending any."""
        self._sign, self._node = sign_of(run, SUPERVISOR_LOCK), node
        self._agent = secrets.token_hex(8)  # tells it from others of this node
        self._next, self._last = Interval(), Report("", "")
        self._problem = ""

    def send(self, report: Report) -> str:
        """Send a report if it differs from the last one, or a heartbeat is due.

        Returns:
            Why it cannot be sent, unless that was returned before; else "".
        """
        if not self._next.due(QUIET_SECONDS) and report == self._last:
            return ""
        self._last = report
        endpoint = control.read_json(self._sign) or {}
        if not endpoint.get("port"):  # no supervisor, or one without other nodes
            return ""
        sender = {"host": socket.gethostname(), "node": self._node, "agent": self._agent}
        data = {**dataclasses.asdict(report), **sender, "key": endpoint["key"]}
        before, self._problem = self._problem, ""
        try:
            address = str(endpoint["address"]), int(endpoint["port"])
            with socket.create_connection(address, _CONNECT_SECONDS) as connection:
                connection.sendall(files.strict_json(data).encode())
        except OSError as error:
            where = "node 0, port {port} of {address}".format(**endpoint)
            self._problem = f"cannot connect to {where}: {error.strerror or error}"
        return self._problem if self._problem != before else ""


class Listener:
    """A port of node 0, which receives the reports of the other nodes."""

    def __init__(self, address: str) -> None:
        """Listen on a free port, on all interfaces; `address` is this machine's for the others."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=both
        )
        self._socket.setblocking(False)
        port = int(self._socket.getsockname()[1])
        self.endpoint = {"address": address, "port": port, "key": secrets.token_hex(16)}
        """The key is known to those who can read the run's folder; reports with another one are
        ignored."""

    def accept(self) -> list[dict[str, Any]]:
        """Accept and close the waiting connections; return the reports received."""
        reports = []
        with contextlib.suppress(OSError):  # BlockingIOError: no more
            while True:
                connection = self._socket.accept()[0]
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(_RECEIVE_SECONDS)
                    reports.append(control.parse_object(connection.recv(_MAX_REPORT)) or {})
        return [report for report in reports if report.get("key") == self.endpoint["key"]]

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def _read_sign(path: Path) -> tuple[int, bytes] | None:
    """Return the time and the content of a file; None if it cannot be read now."""
    try:
        with path.open("rb") as file:  # opening asks a network file system for the time
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except OSError:
        return None


class SupervisorLiveness:
    """The heartbeats of node 0: those of its supervisor and of rank 0.

    Rank 0's counts too, so that an attempt survives the end of its supervisor.
    """

    def __init__(self, run: Path) -> None:
        """Start now; node 0 counts as silent after SILENCE_SECONDS."""
        paths = (sign_of(run, SUPERVISOR_LOCK), control.folder_of(run) / heartbeat.FILE_NAME)
        self._known = {path: _read_sign(path) for path in paths}
        self._last = self._asked = time.monotonic()

    def listen(self) -> None:
        """Read the files until one is new; may block while their file system is unavailable."""
        for path, known in self._known.items():
            newest = _read_sign(path)
            if newest not in (None, known):
                self._known[path], self._last = newest, time.monotonic()
                return

    def silence(self, limit: float = 0.0) -> str:
        """Describe a silence of node 0 that is too long, without reading files; else "".

        Args:
            limit: the longest silence, in seconds; 0: SILENCE_SECONDS.
        """
        seconds, now = limit or SILENCE_SECONDS, time.monotonic()
        if now - self._asked > MAX_PAUSE:
            self._last += now - self._asked
        self._asked = now
        if now - self._last <= seconds:
            return ""
        return f"it received no heartbeat from node 0 for {seconds:.0f} s"


class OtherNodes:
    """State of the other nodes, as the supervisor on node 0 knows it."""

    def __init__(self, count: int, start: str, listener: Listener | None) -> None:
        """Start without reports.

        Args:
            count: number of nodes.
            start: token of the supervisor's start, which its own agents serve.
            listener: receives the reports; None if there is no other node.
        """
        self._start, self._listener = start, listener
        self._reports: dict[int, dict[str, Any]] = {node: {} for node in range(1, count)}
        self._read_at = self._looked = time.monotonic()
        self._heard = dict.fromkeys(self._reports, self._read_at)
        self._replaced = dict.fromkeys(self._reports, "")

    def replace(self, node: int) -> None:
        """Expect another agent on a node: it will end the one that has reported so far."""
        self._replaced[node] = self._reports[node].get("agent", "")

    def read(self) -> None:
        """Read the reports of all nodes."""
        # What kept this process waiting, as an unavailable file system does, may have kept the
        # other nodes, too: of the time since the last read not more than usual counts.
        now = time.monotonic()
        self._read_at += min(now - self._looked, 2 * QUIET_SECONDS)
        self._looked = now
        for report in self._listener.accept() if self._listener else ():
            if (node := report["node"]) in self._reports:
                self._reports[node], self._heard[node] = report, self._read_at

    def silent(self) -> list[int]:
        """Return the nodes that counted as silent at the last read.

        The limit is shortened by three intervals, so that a dead node is reported within
        SILENCE_SECONDS.
        """
        oldest = self._read_at - (SILENCE_SECONDS - 3 * QUIET_SECONDS)
        return [node for node, heard in self._heard.items() if heard < oldest]

    def name(self, node: int) -> str:
        """Return the number of a node, with its host if known: `1 (gpu-2)`."""
        host = self._reports[node].get("host", "")
        return f"{node} ({host})" if host else str(node)

    def unavailable(self) -> list[int]:
        """Return the nodes that cannot start an attempt: silent, refused, or busy with another.

        Reads their reports. An agent of an earlier start, or one that is being replaced, does not
        count: its successor will end it.
        """
        self.read()
        silent, ready = self.silent(), []
        for node in self._in_state(READY, ENDED):
            start, agent = self._reports[node]["start"], self._reports[node].get("agent")
            is_ours = start in ("", self._start) and agent != self._replaced[node]
            if is_ours and node not in silent:
                ready.append(node)
        return [node for node in self._reports if node not in ready]

    def refusals(self) -> str:
        """Return why nodes cannot take part at all, with their names; "" if there are none."""
        reports = {n: self._reports[n] for n in self._in_state(REFUSED)}
        return few((f"node {self.name(n)} {r['problem']}" for n, r in reports.items()), comma="; ")

    def busy(self) -> list[int]:
        """Read the reports; return the nodes that are alive and run processes of an attempt."""
        self.read()
        silent = self.silent()
        return [node for node in self._in_state(RUNNING) if node not in silent]

    def _in_state(self, *states: str) -> list[int]:
        return [node for node, report in self._reports.items() if report.get("state") in states]

    def problem(self, token: str) -> Problem | None:
        """Return why another node ends the attempt with this token, from the last reports read."""
        if silent := self.silent():
            nodes = few(map(self.name, silent))
            return Problem(CRASH, f"node {nodes} was silent for {SILENCE_SECONDS:.0f} s")
        for node in self._in_state(RUNNING, ENDED):  # the others are from before the attempt
            report = self._reports[node]
            if report["token"] == token and report["problem"]:
                kind = CRASH if report["state"] == ENDED else HANG
                return Problem(kind, f"node {self.name(node)}: {report['problem']}")
        return None
