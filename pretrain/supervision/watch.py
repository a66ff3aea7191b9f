"""Watch a running attempt: silence, and processes that were stopped."""

import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.config.sections import SupervisionConfig
from pretrain.processes import processes
from pretrain.records import heartbeat, metrics
from pretrain.records.control import ControlFile
from pretrain.supervision.decide import HANG, Problem
from pretrain.supervision.nodes import MAX_PAUSE, Interval


class Watch:
    """Watches one attempt on node 0: the heartbeat of rank 0, metrics and processes."""

    def __init__(
        self, run: Path, control_file: ControlFile, config: SupervisionConfig, phases: Sequence[int]
    ) -> None:
        """Watch the attempt of a control file; the steps of a phase take similar times."""
        self._run, self._attempt, self._config, self._phases = run, control_file, config, phases
        self._stopped = StoppedProcesses(run, 0, config.hang_seconds)
        self._beat = heartbeat.NO_BEAT
        self._last_sign = self._looked = time.monotonic()
        self.lines: list[metrics.Line] = []
        """The newest lines of the attempt in metrics.jsonl."""

    def problem(self) -> Problem | None:
        """Return why the attempt has to be ended, if it has to."""
        reason = self._stopped.describe() or self.silence()
        return Problem(HANG, reason) if reason else None

    def silence(self) -> str:
        """Read heartbeat and metrics; describe a silence that is too long, else ""."""
        now = time.monotonic()
        if now - self._looked > MAX_PAUSE:
            self._last_sign = now
        self._looked = now
        newest = metrics.newest_lines(self._run / metrics.METRICS)
        self.lines = [line for line in newest if line["attempt"] == self._attempt.attempt]
        beat = heartbeat.read_heartbeat(self._run, self._attempt.token)
        if beat not in (heartbeat.NO_BEAT, self._beat):
            self._beat, self._last_sign = beat, now
        stage, step = self._beat.stage, self._beat.step
        limit = heartbeat.silence_limit(stage, self._step_seconds(step), self._config)
        if now - self._last_sign <= limit:
            return ""
        return f"no heartbeat for {limit:.0f} s in stage {stage}, step {step}"

    def _step_seconds(self, step: int) -> list[float]:
        """Durations of the last steps of the phase that a step belongs to."""
        first = max((start for start in self._phases if start <= step), default=0)
        return [line["seconds"] for line in self.lines if line["step"] >= first]


class StoppedProcesses:
    """Notices processes of an attempt that are stopped, for example by SIGSTOP.

    Searching all processes of the machine is rare: a process that is stopped in two searches in a
    row counts. It is reported before the silence of its attempt is noticed.
    """

    def __init__(self, run: Path, node: int, limit: float) -> None:
        """Start without any; a process may be stopped for two thirds of `limit` seconds."""
        self._run, self._node, self._seconds = run, node, limit / 3
        self._search, self._before, self._found = Interval(), frozenset[int](), ""

    def describe(self) -> str:
        """Describe a process that has been stopped for too long; "" if there is none."""
        if self._search.due(self._seconds):
            members = processes.members(self._run, self._node)
            stopped = {member.pid: member for member in members if member.stopped}
            self._found = ""
            for pid in stopped.keys() & self._before:
                rank = stopped[pid].rank
                name = "a process" if rank is None else f"rank {rank}"
                self._found = f"{name} (pid {pid}) is stopped, as by SIGSTOP"
            self._before = frozenset(stopped)
        return self._found
