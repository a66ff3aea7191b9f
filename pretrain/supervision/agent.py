"""A machine's agent, where a run has several: `python -m pretrain supervise --node-rank 1 ...`.

It obeys the orders that the first machine's supervisor leaves in the run's folder: starts this
machine's launcher, ends it, says once a second how it fares, and decides nothing. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data_prep import files
from pretrain.config.run import RunConfig
from pretrain.exit_codes import EXIT_PREEMPTED
from pretrain.supervision import control as orders
from pretrain.supervision import jobs, launch, nodes, processes
from pretrain.supervision.control import Order
from pretrain.supervision.nodes import Place, Report
from pretrain.supervision.watch import COUNT_SECONDS, StoppedProcesses

EXIT_FORGOTTEN = 1
"""No order for so long that there may be nobody to give any."""


class Agent:
    """Serves one run on one machine."""

    def __init__(
        self,
        config: RunConfig,
        place: Place,
        write: Callable[[str], object] = lambda text: sys.stdout.write(text),
        poll_seconds: float = 0.5,
    ) -> None:
        """Take this machine's part of the run.

        Raises:
            ValueError: this machine has an agent already, no launcher, or too few GPUs.
        """
        launch.refuse_agents(config.supervision, place.count)
        launch.find_launcher(config.supervision)
        launch.refuse_gpus(config)
        self.config, self.run_folder, self._node = config, Path(config.folder), place.node
        self._limits = config.supervision
        self._write, self._poll = write, poll_seconds
        self._requests = orders.Requests()
        folder = orders.folder_of(self.run_folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / f"agent-{place.node:03d}.lock"
        self._lock = files.lock(lock, f"node {place.node} has an agent already")
        self._reporter = nodes.Reporter(self.run_folder, place.node)
        self._job: jobs.Job | None = None
        self._over: int | None = None
        self._stopped = StoppedProcesses(self._limits.hang_seconds)
        self._next_count = 0.0

    def run(self) -> int:
        """Serve until the run is over; returns the exit code that its leader says.

        The first order that lies there is not begun: it may be of days ago, and if it is of now,
        this machine has lost its part of it.
        """
        with self._lock, self._requests.counted():
            processes.adopt_orphans()
            order = orders.read(self.run_folder)
            self._job = jobs.find(self.run_folder, order, self._node)
            try:
                return self._serve(order)
            finally:
                self._end()

    def _serve(self, seen: Order | None) -> int:
        report = Report("", nodes.READY)
        if seen:
            state = nodes.RUNNING if self._job else nodes.ENDED
            report = Report(seen.token, state, "its agent was started anew")
        if not self._job:
            self._end()
        idle_since = time.monotonic()
        while True:
            order = self._order() or seen
            if order and order != seen:
                report, seen = self._obey(order, report), order
            code = self._leaving(order, idle_since)
            if code is not None:
                return code
            report = self._with_stopped(self._with_end(report))
            self._reporter.tell(report)
            if self._job:
                idle_since = time.monotonic()
            time.sleep(self._poll)

    def _order(self) -> Order | None:
        """The order that counts; `None` where there is none, or it cannot be read now."""
        try:
            return orders.read(self.run_folder)
        except OSError:
            return None

    def _leaving(self, order: Order | None, idle_since: float) -> int | None:
        """The exit code with which to leave now; passes on a request to leave soon."""
        if self._over is not None:
            return self._over
        if self._requests.count:
            if self._job is None or self._requests.count > 1 or order is None:
                return EXIT_PREEMPTED
            with contextlib.suppress(OSError):  # asked again at the next look
                orders.request_stop(self.run_folder, order.token)
        if self._job is None and time.monotonic() - idle_since > self._limits.node_wait_seconds:
            self._say(f"no order for {self._limits.node_wait_seconds:.0f} s")
            return EXIT_FORGOTTEN
        return None

    def _obey(self, order: Order, report: Report) -> Report:
        """Make this machine do what an order says; returns what to report."""
        self._end()
        if order.state == orders.OVER:
            self._over = order.code
        if order.state != orders.RUN:
            return Report(report.token, nodes.READY)
        log = jobs.log_of(self.run_folder, order.attempt, self._node)
        try:
            self._job = jobs.start(self.config, self.run_folder, order, self._node, log)
        except (OSError, ValueError) as error:  # such as more ranks than there are GPUs here
            self._say(f"attempt {order.attempt} could not be started: {error}")
            return Report(order.token, nodes.ENDED, f"it could not be started: {error}")
        self._say(f"attempt {order.attempt} begun  (log: {log})")
        return Report(order.token, nodes.RUNNING)

    def _with_end(self, report: Report) -> Report:
        """The report, or that the launcher has ended since."""
        if self._job is None or not self._job.ended():
            return report
        reason = f"its launcher {self._job.how_ended()}"
        self._end()
        self._say(reason)
        return Report(report.token, nodes.ENDED, reason)

    def _with_stopped(self, report: Report) -> Report:
        """The report, with a process of ours that has been stopped for too long."""
        now = time.monotonic()
        if self._job is None or now < self._next_count:
            return report
        self._next_count = now + COUNT_SECONDS
        return dataclasses.replace(report, stopped=self._stopped.look(self._job.members()))

    def _end(self) -> None:
        """Let no process of the run be left on this machine."""
        if self._job:
            self._job.end(self._limits.grace_seconds)
        else:
            processes.end_all(self.run_folder, self._limits.grace_seconds, self._node)
        self._job = None

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody may be listening any more
            self._write(f"[node {self._node}] {text}\n")
            sys.stdout.flush()
