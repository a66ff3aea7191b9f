"""What a supervisor sees of a running attempt, and what it complains of.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pretrain.config.run import SupervisionConfig
from pretrain.run import metrics
from pretrain.supervision import heartbeat
from pretrain.supervision.processes import Member

COUNT_SECONDS = 1.0
"""Between two looks at all processes of the machine."""
_LONGEST_PAUSE = 10.0
"""Seconds between two such looks after which the watcher itself must have been stopped."""
_STEPS = 1000
"""Last steps whose duration says how long one may take."""


@dataclasses.dataclass(frozen=True)
class Complaint:
    """Why an attempt has to be ended."""

    kind: str
    """ladders.CRASH or ladders.HANG."""
    reason: str


def complain(kind: str, reason: str) -> Complaint | None:
    """A complaint where there is a reason for one."""
    return Complaint(kind, reason) if reason else None


class Watch:
    """One attempt's signs of life."""

    def __init__(
        self,
        run: Path,
        token: str,
        config: SupervisionConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch, without having seen anything yet."""
        self._run, self._token, self._config, self._clock = run, token, config, clock
        self._metrics = Follower(run / metrics.METRICS, metrics.METRICS)
        self._beat, self._heard = heartbeat.NO_BEAT, clock()
        self._known: set[str] = set()
        self._incomplete_since: float | None = None
        self.lines: deque[dict[str, Any]] = deque(maxlen=_STEPS)
        """The newest lines of metrics.jsonl that were written since."""

    def look(self) -> str:
        """Read heartbeat and metrics; says why the attempt hangs, "" where it does not."""
        now, beat, lines = (
            self._clock(),
            heartbeat.read(self._run, self._token),
            self._metrics.new(),
        )
        self.lines.extend(lines)
        if beat == heartbeat.NO_BEAT:  # nothing is there, or it cannot be read now
            beat = self._beat
        if lines or beat != self._beat:
            self._beat, self._heard = beat, now
        limit = heartbeat.silence_limit(
            beat.phase, [line["seconds"] for line in self.lines], self._config
        )
        if now - self._heard <= limit:
            return ""
        return f"nothing was heard of it for {limit:.0f} s in phase {beat.phase}, step {beat.step}"

    def count(self, ranks: set[str]) -> str:
        """Take in which ranks of this machine live; says if some have gone and others stay.

        The launcher does not see a rank that ends well before its time, and it is given some
        seconds to see to the others. Below srun nobody's environment tells a rank from what it
        started; there only silence tells.
        """
        if self._config.launcher == "srun":
            return ""
        now = self._clock()
        self._known |= ranks
        gone = self._known - ranks
        if not gone:
            self._incomplete_since = None
            return ""
        if self._incomplete_since is None:
            self._incomplete_since = now
        if now - self._incomplete_since <= self._config.grace_seconds:
            return ""
        names = ", ".join(sorted(gone, key=int))
        return f"rank {names} ended, and the launcher or other ranks still run"


class StoppedProcesses:
    """Which processes of an attempt are stopped, and for how long."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without having seen any; `limit` is how many seconds a process may be stopped."""
        self._limit, self._clock = limit, clock
        self._since: dict[int, float] = {}
        self._looked = -math.inf

    def look(self, members: Sequence[Member]) -> str:
        """Note which processes are stopped; name one that is for too long, "" where none is."""
        now = self._clock()
        # After a pause this process was stopped as well, perhaps with all others: count from now.
        known = self._since if now - self._looked <= _LONGEST_PAUSE else {}
        self._looked = now
        stopped = [member for member in members if member.stopped]
        self._since = {member.pid: known.get(member.pid, now) for member in stopped}
        for member in stopped:
            if now - self._since[member.pid] > self._limit:
                name = "a process" if member.rank is None else f"rank {member.rank}"
                return f"{name} (pid {member.pid}) has been stopped for {self._limit:.0f} s"
        return ""


_LONGEST_LINE = 1 << 16
"""Bytes."""


class Follower:
    """The new whole lines of a growing JSON Lines file, without reading it twice."""

    def __init__(self, path: Path, name: str = "") -> None:
        """Begin at the end of the last whole line: an attempt that begins cuts off a torn one.

        Args:
            path: of the file.
            name: of the kind of file, which says what a valid line has (`metrics.parse_line`).
        """
        self._path, self._name, self._offset = path, name, 0
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            start = file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
            self._offset = start + file.read().rfind(b"\n") + 1

    def new(self) -> list[dict[str, Any]]:
        """The valid lines since the last call; none where the file cannot be read now."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        lines = (metrics.parse_line(line, self._name) for line in data[:whole].splitlines())
        return [line for line in lines if line is not None]
