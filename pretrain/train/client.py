"""A rank's link to its supervisor: writes heartbeats, reads stop requests, notices a newer attempt.

An attempt without a supervisor uses it too: the heartbeat is written, but nobody reads it.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from data_prep.common.exit_codes import EXIT_FAILED, EXIT_PREEMPTED
from pretrain.loop.protocols import GO_ON, StepRecord
from pretrain.records import control, heartbeat


class SupervisorClient:
    """The connection of one rank to its supervisor, by way of control files."""

    def __init__(self, run: Path, token: str, rank: int, last_step: int) -> None:
        """Listen for signals, and report on rank 0 that the attempt is being set up.

        Args:
            run: the run's folder.
            token: of the attempt.
            rank: of this process.
            last_step: a stop request has no effect after so many updates.
        """
        self._run, self._token, self._last_step = run, token, last_step
        self._heartbeat = heartbeat.Heartbeat(run, token) if rank == 0 else None
        self.stopped_after = 0
        """Number of updates done when the loop was asked to stop; known on rank 0 only."""
        control.stop_on_signals(run, token, os.environ)
        self.report_setup()

    def _beat(self, stage: str, step: int) -> bool:
        return self._heartbeat is not None and self._heartbeat.beat(stage, step)

    def report_setup(self) -> None:
        """Report on rank 0 that the set-up has made progress."""
        self._beat(heartbeat.INIT, 0)

    @contextlib.contextmanager
    def stage(self, stage: str, step: int) -> Iterator[None]:
        """Show a stage other than a step in the heartbeat, after `step` updates."""
        self._beat(stage, step)
        yield
        self._beat(heartbeat.STEP, step)

    def verdict(self, record: StepRecord) -> int:
        """Return GO_ON, or the exit code to stop with after a step; an observer of rank 0."""
        steps = record.step + 1
        is_due = self._beat(heartbeat.STEP, steps)
        # Every few seconds: a superseded attempt must not even go on writing metrics.
        if is_due and control.superseded(self._run, control.token_of(os.environ)):
            with contextlib.suppress(OSError):  # the log may be on a full disk
                sys.stderr.write("pretrain.train: a newer attempt was started; this one stops\n")
            return EXIT_FAILED
        if steps < self._last_step and control.stop_requested(self._run, self._token):
            self.stopped_after = steps
            return EXIT_PREEMPTED
        return GO_ON
