"""The agent of a node other than node 0: `zeroclap supervise --node-rank 1 ...`.

It follows the control file that the supervisor on node 0 writes: it starts and ends the launcher of
this node and reports on it. It makes one decision: if node 0 is silent for too long, it ends the
launcher, so that no processes are left on a machine that has lost its connection or its file
system.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from data_prep.common import console, files
from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from pretrain.config.run import RunConfig
from pretrain.processes import launching, processes
from pretrain.records import control, ledger
from pretrain.records.control import ControlFile
from pretrain.records.folder import SUPERVISED, damage_of_result
from pretrain.supervision import decide, launch, nodes
from pretrain.supervision.nodes import Report, SupervisorLiveness
from pretrain.supervision.watch import StoppedProcesses

MODULE = "pretrain.supervision.agent"
"""The module that is started on the other machines of a hostfile."""
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.5
"""Between two checks of the control file and the launcher."""


class Agent:
    """Runs the attempts of one run on one node."""

    def __init__(self, config: RunConfig, node: int, start: str = "") -> None:
        """Lock this node of the run.

        Args:
            config: the recipe.
            node: number of this node.
            start: token of the supervisor's start that it serves; "" to serve any. It takes over a
                running attempt of another start.

        Raises:
            ValueError: This node has an agent already.
        """
        self._settings = config.supervision
        self._config, self._run, self._node = config, Path(config.folder), node
        self._stop_requests = control.StopRequests()
        folder = control.folder_of(self._run)
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / f"agent-{self._node:03d}.lock"
        self._lock = files.lock(lock, f"node {self._node} has an agent already")
        self._control_file: ControlFile | None = None
        self._job: launch.Job | None = None
        self._start, self._report = start, Report("", nodes.READY, start=start)
        self._stopped = StoppedProcesses(self._run, self._node, self._settings.hang_seconds)
        self._supervisor = SupervisorLiveness(self._run)
        self._idle_since = time.monotonic()
        self._look = nodes.Interval()
        self._reporter = nodes.Reporter(self._run, self._node)

    def run(self, *, goes_on: bool = False) -> int:
        """Follow the control file until it says exit; return the exit code.

        Args:
            goes_on: the supervisor records a new segment first, also of a finished run.

        Raises:
            ValueError: The ledger does not verify.
        """
        with self._lock, self._stop_requests.counted():
            records = ledger.read_ledger(self._run / ledger.FILE_NAME)
            finished = isinstance(decide.decide(records, self._config), decide.Finished)
            leaves = finished and not goes_on  # no supervisor will come, unless to mend damage
            if leaves and not damage_of_result(self._run, ledger.run_state(records)):
                self._print("finished")
                return EXIT_DONE
            processes.adopt_orphans()
            try:
                self._take_over()
                with control.repeated(1.0, self._end_orphans):
                    while (code := self._poll()) is None:
                        time.sleep(_POLL_SECONDS)
                return code
            finally:
                self._end_job()
                # A supervisor that waits for this node would wait until it counts as silent.
                self._set_report(nodes.ENDED, "its agent ended")
                self._reporter.send(self._report)

    def _take_over(self) -> None:
        """Adopt the attempt of the control file if it runs here; else end its processes.

        An attempt that does not run here is not started: the control file may be days old, or this
        node has lost its part of the attempt.
        """
        found = control.read_control_file(self._run)
        self._job = launch.find(self._run, found, self._node)
        if found and found.state == control.EXIT and found.start == self._start != "":
            return  # its supervisor left while it was starting: it follows this one
        self._control_file = found
        if self._job:
            self._set_report(nodes.RUNNING, token=self._job.control_file.token)
            return
        if found:
            self._set_report(nodes.ENDED, "its agent was restarted", token=found.token)
        self._end_job()

    def _set_report(self, state: str, problem: str = "", **token: str) -> None:
        """Set the report, by default on the same attempt."""
        self._report = dataclasses.replace(self._report, state=state, problem=problem, **token)

    def _poll(self) -> int | None:
        """Follow the control file, check the launcher, report; return an exit code to stop."""
        newest = None
        if self._look.due(0.6 * nodes.QUIET_SECONDS if self._job else 0.0):
            self._supervisor.listen()
            newest = control.try_read(self._run)
        if newest and newest != self._control_file:
            # One of another start may come from another machine, whose agents need our lock.
            if newest.state == control.EXIT or self._start not in ("", newest.start):
                return newest.code
            self._follow(newest)
        code = self._exit_code()
        if code is None:
            self._check_job()
            if problem := self._reporter.send(self._report):
                self._print(problem)
        return code

    def _follow(self, control_file: ControlFile) -> None:
        """Carry out a new control file on this node."""
        self._end_job()
        self._control_file = control_file
        if control_file.state != control.RUN:
            self._set_report(nodes.READY)
            return
        attempt, token = f"attempt {control_file.attempt}", control_file.token
        # Stopped processes found in the last attempt would end this one, too.
        self._stopped = StoppedProcesses(self._run, self._node, self._settings.hang_seconds)
        try:
            self._job = launch.start(self._run, control_file, self._node)
        except (OSError, ValueError) as error:  # such as too few GPUs on this node
            self._print(f"{attempt} could not be started: {error}")
            self._set_report(nodes.ENDED, f"it could not be started: {error}", token=token)
        else:
            self._print(f"{attempt} started  (log: {self._job.log})")
            self._set_report(nodes.RUNNING, token=token)

    def _exit_code(self) -> int | None:
        """Return the exit code if a stop was requested, or no supervisor came for too long.

        The first request is forwarded to a running attempt, the second one ends it. After an
        attempt the supervisor has GRACE_SECONDS to name the exit code: it may have been the last.
        """
        idle = time.monotonic() - self._idle_since
        if self._stop_requests.count > 1:
            return EXIT_PREEMPTED
        if self._stop_requests.count and self._job:
            with contextlib.suppress(OSError):  # written again at the next poll
                control.request_stop(self._run, self._job.control_file.token)
        elif self._stop_requests.count and idle > processes.GRACE_SECONDS:
            return EXIT_PREEMPTED
        silence = self._supervisor.silence(self._settings.node_wait_seconds)
        if self._job is None and silence:
            self._print(silence)
            return EXIT_FAILED
        return None

    def _check_job(self) -> None:
        """Update the report: whether the launcher ended, or a process is stopped."""
        if self._job is None:
            return
        self._idle_since = time.monotonic()
        if self._job.ended():
            launcher = f"its launcher {launching.describe_exit(self._job.code())}"
            reason = self._supervisor.silence() or launcher
            self._end_job()
            self._print(reason)
            self._set_report(nodes.ENDED, reason)
        else:
            self._set_report(nodes.RUNNING, self._stopped.describe())

    def _end_orphans(self) -> None:
        """End the launcher if node 0 is silent; in a thread, as the main one may be blocked."""
        if (job := self._job) and self._supervisor.silence():  # the main thread may forget it
            with contextlib.suppress(TimeoutError):  # tried again in a second
                job.end(processes.GRACE_SECONDS)

    def _end_job(self) -> None:
        """End all processes of the run on this node."""
        if self._job:
            self._job.end(processes.GRACE_SECONDS)
        else:
            processes.end_all(self._run, processes.GRACE_SECONDS, self._node)
        self._job = None

    def _print(self, text: str) -> None:
        print(f"[node {self._node}] {text}", flush=True)


def tell_refusal(config: RunConfig, node: int, reason: str) -> None:
    """Report why this node cannot take part, until the supervisor exits or stops waiting.

    Args:
        config: the recipe.
        node: number of this node.
        reason: why it is refused.
    """
    run, before = Path(config.folder), control.try_read(Path(config.folder))
    stop = "reporting to node 0 (Ctrl-C to stop)"
    print(f"[node {node}] refused; {stop}: {reason}", flush=True)
    deadline = time.monotonic() + config.supervision.node_wait_seconds
    reporter = nodes.Reporter(run, node)
    report = Report("", nodes.REFUSED, f"is refused: {reason}")
    while time.monotonic() < deadline:
        reporter.send(report)
        newest = control.try_read(run)
        if newest and newest != before and newest.state == control.EXIT:
            return
        time.sleep(1.0)


@console.survive_broken_pipe(is_result=False)
def main(arguments: Sequence[str]) -> int:
    """Run the agent that `hosts.Agents` starts on another machine of a hostfile.

    Args:
        arguments: the run's folder, the node's number, and the token of the supervisor's start.
    """
    from pretrain.config.load import load

    folder, node, start = arguments
    _end_predecessors(folder, node)
    return Agent(load(str(Path(folder) / SUPERVISED)), int(node), start).run()


def _end_predecessors(folder: str, node: str) -> None:
    """Kill other agents of a node, which no longer report; a new one takes over their ranks.

    They may be stopped, or their ssh may have ended.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_agent = MODULE in words and words[words.index(MODULE) + 1 :][:2] == [folder, node]
            if is_agent and process.pid != os.getpid():
                process.kill()
                found.append(process)
    psutil.wait_procs(found, _KILL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
