"""What ties a rank to whoever supervises it: heartbeats out, requests and orders in.

An attempt that nobody supervises has the same ties, and nobody at their other end. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pretrain.loop import GO_ON
from pretrain.supervision import control as orders
from pretrain.supervision import heartbeat

EXIT_SUPERSEDED = 1


class Tether:
    """One rank's."""

    def __init__(self, run: Path, token: str, rank: int, last_step: int) -> None:
        """Listen for signals, and on rank 0 say that the attempt is being set up.

        Args:
            run: the run's folder.
            token: of the attempt.
            rank: this one.
            last_step: after which there is nothing left to be saved for.
        """
        self._run, self._token, self._last_step = run, token, last_step
        self._heartbeat = heartbeat.Heartbeat(run, token) if rank == 0 else None
        self.steps = 0
        """Updates done when the loop was told to stop; known to rank 0 alone."""
        orders.stop_on_signals(run, token, os.environ)
        self.starting()

    def _beat(self, phase: str, step: int) -> bool:
        return self._heartbeat is not None and self._heartbeat.beat(phase, step)

    def starting(self) -> None:
        """Say on rank 0 that the start-up has come one step further."""
        self._beat(heartbeat.INIT, 0)

    def during(
        self, phase: str, action: Callable[[int], None], after: str = heartbeat.STEP
    ) -> Callable[[int], None]:
        """Wrap `action` so that it is a phase of its own, which phase `after` follows."""

        def act(step: int) -> None:
            self._beat(phase, step)
            action(step)
            self._beat(after, step)

        return act

    def verdict(self, steps: int) -> int:
        """Whether the attempt is to end after so many updates; asked on rank 0 after each."""
        told = self._beat(heartbeat.STEP, steps)
        # Once a second: an attempt that was superseded must not even go on writing metrics.
        if told and orders.superseded(self._run, orders.token_of(os.environ)):
            with contextlib.suppress(OSError):  # its log may be on a full disk
                sys.stderr.write(
                    "pretrain.train: another attempt has been ordered; this one stops\n"
                )
            return EXIT_SUPERSEDED
        if steps < self._last_step and orders.stop_requested(self._run, self._token):
            self.steps = steps
            return orders.EXIT_PREEMPTED
        return GO_ON
