"""Watch a running attempt: silence, ranks that ended early, processes that were stopped."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pretrain.config.sections import SupervisionConfig
from pretrain.processes import processes
from pretrain.records import control, heartbeat, metrics
from pretrain.supervision.decide import CRASH, HANG, Problem

_MAX_PAUSE = 10.0
"""Seconds between two looks at the processes. If more have passed, the watcher was stopped too."""
_STEPS = 1000
"""Last steps whose durations determine how long a step may take."""
_MAX_LINE = 1 << 16
"""Bytes."""


class Watch:
    """What node 0 sees of one attempt: heartbeat, metrics and processes."""

    def __init__(
        self,
        run: Path,
        token: str,
        config: SupervisionConfig,
        clock: Callable[[], float] = time.monotonic,
        phases: Sequence[int] = (),
    ) -> None:
        """Start to watch the attempt with this token; steps of one of the phases are alike."""
        self._phases = phases
        self._run, self._token, self._config, self._clock = run, token, config, clock
        parse = functools.partial(metrics.parse_line, name=metrics.METRICS)
        self._metrics = Follower(run / metrics.METRICS, parse)
        self._stopped = StoppedProcesses(config.hang_seconds, clock)
        self._beat, self._last_sign = heartbeat.NO_BEAT, clock()
        self._heartbeat = Replaced(heartbeat.path_of(run))
        self._known_ranks: set[str] = set()
        self._incomplete_since = math.inf
        self.lines: deque[dict[str, Any]] = deque(maxlen=_STEPS)
        """The newest lines that were added to metrics.jsonl since the watch started."""

    def problem(self, members: Sequence[processes.Member]) -> Problem | None:
        """Return why the attempt has to be ended, if it has to.

        Args:
            members: living processes of the attempt on this node.
        """
        if silent := self.silence():
            return Problem(HANG, silent)
        if lost := self.lost_ranks({member.rank for member in members if member.rank}):
            return Problem(CRASH, lost)
        if stopped := self._stopped.describe(members):
            return Problem(HANG, stopped)
        return None

    def silence(self) -> str:
        """Read heartbeat and metrics; describe a silence that is too long, else return ""."""
        now = self._clock()
        beat, lines = self._beat, self._metrics.new()
        self.lines.extend(lines)
        if self._heartbeat.is_new():
            beat = heartbeat.read_heartbeat(self._run, self._token)
        if beat == heartbeat.NO_BEAT:  # not written yet, or it cannot be read now
            beat = self._beat
        if lines or beat != self._beat:
            self._beat, self._last_sign = beat, now
        limit = heartbeat.silence_limit(beat.stage, self._step_seconds(beat.step), self._config)
        if now - self._last_sign <= limit:
            return ""
        return f"no sign of life for {limit:.0f} s in stage {beat.stage}, step {beat.step}"

    def _step_seconds(self, step: int) -> list[float]:
        """Durations of the last steps of the phase that a step belongs to."""
        first = max((start for start in self._phases if start <= step), default=0)
        return [line["seconds"] for line in self.lines if line["step"] >= first]

    def lost_ranks(self, ranks: set[str]) -> str:
        """Describe ranks that ended while others, or the launcher, still run; else return "".

        The launcher does not notice a rank that exits early with code 0. It has GRACE_SECONDS to
        end the other ranks.

        Args:
            ranks: that are alive on this node.
        """
        now = self._clock()
        self._known_ranks |= ranks
        lost = self._known_ranks - ranks
        self._incomplete_since = min(now, self._incomplete_since) if lost else math.inf
        if now - self._incomplete_since <= processes.GRACE_SECONDS:
            return ""
        names = ", ".join(sorted(lost, key=int))
        return f"rank {names} ended, and the launcher or other ranks still run"


class StoppedProcesses:
    """Notices processes of an attempt that are stopped, for example by SIGSTOP."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without any; a process may be stopped for `limit` seconds."""
        self._limit, self._clock = limit, clock
        self._since: dict[int, float] = {}
        self._last_look = -math.inf

    def describe(self, members: Sequence[processes.Member]) -> str:
        """Describe a process that has been stopped for too long; "" if there is none."""
        now = self._clock()
        # After a pause this process was stopped as well, perhaps with all others: count from now.
        known = self._since if now - self._last_look <= _MAX_PAUSE else {}
        self._last_look = now
        stopped = [member for member in members if member.stopped]
        self._since = {member.pid: known.get(member.pid, now) for member in stopped}
        for member in stopped:
            if now - self._since[member.pid] > self._limit:
                name = "a process" if member.rank is None else f"rank {member.rank}"
                return f"{name} (pid {member.pid}) has been stopped for {self._limit:.0f} s"
        return ""


class Replaced:
    """Notices that a file was replaced, without opening it; for a writer on this machine.

    A network file system may keep for a minute what it knows of a file that another machine writes.
    """

    def __init__(self, path: Path) -> None:
        """Any file is new at first."""
        self._path, self._known = path, (0, 0)

    def is_new(self) -> bool:
        """Return whether the file is another one than at the last call; False if it is missing."""
        try:
            found = self._path.stat()
        except OSError:
            return False
        before, self._known = self._known, (found.st_ino, found.st_mtime_ns)
        return self._known != before


class Follower:
    """Returns the new lines of a growing JSON Lines file, which this machine writes.

    Once it has grown it stays open: an open a step is much for a file system that many share.
    """

    def __init__(
        self, path: Path, parse: Callable[[bytes], dict[str, Any] | None] = control.parse_object
    ) -> None:
        """Start at the end of the last whole line; the next writer cuts off a torn line.

        Args:
            path: of the file.
            parse: of one line; `None` if the line is not valid.
        """
        self._path, self._parse, self._offset = path, parse, 0
        self._file: BinaryIO | None = None
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            start = file.seek(max(0, path.stat().st_size - _MAX_LINE))
            self._offset = start + file.read().rfind(b"\n") + 1

    def new(self) -> list[dict[str, Any]]:
        """Return the valid lines since the last call; none if the file cannot be read now."""
        try:
            if self._path.stat().st_size == self._offset:
                return []
            if self._file is None:
                self._file = self._path.open("rb", buffering=0)
                weakref.finalize(self, self._file.close)
            self._file.seek(self._offset)
            data = self._file.read()
        except OSError:
            data = b""
        if not data:  # it cannot be read now, or is another file
            self._file = None
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        parsed = map(self._parse, data[:whole].splitlines())
        return [line for line in parsed if line is not None]
