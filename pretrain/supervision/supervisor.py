"""Launch a run, watch it and relaunch it until it is finished: `zeroclap supervise`.

The supervisor starts attempts through a launcher; it never trains and needs no torch. The ledger
alone determines what to do next (decide.py), because exit codes can be wrong: ranks that leave
early with code 0 look like success. watch.py notices problems, and agent.py acts on the other
nodes. Read `Supervisor._next` first, then `_run_to_end`.
"""

import contextlib
import dataclasses
import errno
import math
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE
from data_prep.common.wording import count, few
from pretrain.config.run import RunConfig
from pretrain.processes import launching, processes
from pretrain.records import control, failures, history, ledger, metrics, progress, wording
from pretrain.records import folder as run_folder
from pretrain.records.checkpoints import folder_of, free_bytes
from pretrain.records.control import ControlFile
from pretrain.records.segments import Course
from pretrain.spikes.policy import GiveUp, Rollback
from pretrain.supervision import decide, hosts, launch, nodes, notify
from pretrain.supervision.decide import CRASH, Problem
from pretrain.supervision.launch import Job
from pretrain.supervision.nodes import Node, OtherNodes
from pretrain.supervision.watch import Watch

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_DISK_SECONDS = 600.0
"""How long to retry after disk errors other than a full disk."""
_LEAST_BYTES = 16 << 20
"""Free bytes required on the disk before a launch."""
_SAVE_SECONDS = 240.0
"""Time to finish the step and save when the run is asked to stop."""
_POLL_SECONDS = 0.5
"""Between two checks of a running attempt, or of what is waited for."""
_ONLY_NODE = Node()


class Supervisor:
    """Supervises one run."""

    def __init__(
        self, config: RunConfig, node: Node = _ONLY_NODE, machines: Sequence[str] = ()
    ) -> None:
        """Lock the run's folder.

        Args:
            config: the recipe.
            node: this node, node 0 of the run.
            machines: of a hostfile, one for each node; agents are started on them.

        Raises:
            ValueError: Another supervisor uses the folder, or its ledger does not verify.
        """
        self.config, self.run_folder, self._node = config, Path(config.folder), node
        self._settings, self.ledger = config.supervision, self.run_folder / ledger.FILE_NAME
        self._validation = self.run_folder / metrics.VALIDATION
        self._progress = progress.ProgressPrinter(config.training.steps, "[supervisor] ")
        self._print = self._progress.say
        self._stop_requests, self._saved_by = control.StopRequests(), math.inf
        run_folder.check_not_elsewhere(self.run_folder)  # before it is told to stop
        listener = nodes.Listener(node.address) if node.count > 1 else None
        self._endpoint = listener.endpoint if listener else {}
        self._lock = run_folder.lock(self.run_folder, run_folder.SUPERVISOR_LOCK, self._endpoint)
        if listener:
            self._lock.callback(listener.close)
        self._found = control.read_control_file(self.run_folder)
        """The control file of the supervisor before."""
        self._agents = hosts.Agents(machines, self.run_folder, self._print)
        self._other_nodes = OtherNodes(node.count, self._agents.start, listener)
        self._records_printed = len(ledger.read_ledger(self.ledger))
        self._sizes = {path: _size(path) for path in (self.ledger, self._validation)}
        """Sizes of the files whose new lines are printed."""

    def run(self) -> int:
        """Launch attempts until the run is finished or given up, or a stop is requested.

        Returns:
            The exit code: 0 finished, 1 given up, 2 refused by the ranks, 76 stopped on request.

        Raises:
            ValueError: The ledger does not verify, or the run is being trained without supervisor.
        """
        with self._lock, self._stop_requests.counted():
            processes.adopt_orphans()
            code = EXIT_USAGE  # of a ValueError
            try:
                code = self._supervise()
            except OSError as error:
                self._print(f"stopped: {error}; restart it when this is fixed")
                code = EXIT_PREEMPTED if self._stop_requests.count else EXIT_FAILED
            finally:
                with contextlib.suppress(OSError):
                    self._release_nodes(code)
            return code

    def _supervise(self) -> int:
        """Follow the ledger until the run stops; return the exit code.

        After an error of the disk everything is tried again from the beginning, as a new supervisor
        would.

        Raises:
            OSError: a stop was requested, or the disk has failed for too long.
        """
        failing_since, printed = math.inf, ""
        while True:
            try:
                code = self._take_over()
                while code is None:
                    code = self._next()
                    failing_since, printed = math.inf, ""
                return code
            except OSError as error:
                failing_since = min(failing_since, time.monotonic())
                limit = math.inf if error.errno in _NO_ROOM else _DISK_SECONDS
                if self._stop_requests.count or time.monotonic() - failing_since >= limit:
                    raise
                if str(error) != printed:
                    printed = str(error)
                    self._print(f"{error}; trying again")
                time.sleep(_POLL_SECONDS)

    def _take_over(self) -> int | None:
        """Continue an attempt that has lost its supervisor, or clean up after it."""
        from pretrain.config.load import dump

        self._check_folder()
        self._check_not_replaced()
        dump(self.config, self.run_folder / run_folder.SUPERVISED)
        control_file = control.read_control_file(self.run_folder)
        if job := launch.find(self.run_folder, control_file):
            still = f"attempt {job.control_file.attempt} still runs; watching it"
            self._print(f"{still}; settings that changed hold from the next attempt on")
            return self._run_to_end(job)
        if self._settings.hostfile or (control_file and control_file.state != control.EXIT):
            # If its supervisor only stood still, it sees that another one wrote this, and leaves.
            # So do agents over ssh of earlier starts, which hold the locks of their nodes.
            last = control_file or ControlFile(secrets.token_hex(8), 0, control.STOP)
            self._write_control_file(dataclasses.replace(last, state=control.STOP))
        processes.end_all(self.run_folder, processes.GRACE_SECONDS)
        self._check_not_trained()
        errors = failures.read_failures(self.run_folder, control_file.token) if control_file else []
        if attempt := decide.open_attempt(self._records()):
            unrecorded = "its end was not recorded: its supervisor was killed, or the disk was full"
            reason = failures.explain(errors) or unrecorded
            number, step = attempt["attempt"], attempt["step"]
            self._record(CRASH, attempt=number, step=step, reason=reason)
        run_folder.reject_damaged_result(self.run_folder, self._state())
        self._print_news()
        return None

    def _check_not_trained(self) -> None:
        """Refuse a run that is trained without a supervisor; wait for a process that is exiting.

        One that was killed before this start keeps its lock until its memory is freed.
        """
        deadline = time.monotonic() + processes.KILL_SECONDS
        while True:
            try:
                return run_folder.lock(self.run_folder).close()
            except ValueError:
                if run_folder.holder(self.run_folder) or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def _next(self) -> int | None:
        """Take the next action that the ledger requires; return an exit code to stop."""
        self._check_folder()
        decision = decide.decide(self._records(), self.config)
        if isinstance(decision, decide.Finished):
            self._print("finished")
            return EXIT_DONE
        if isinstance(decision, GiveUp):
            return self._give_up(decision.reason)
        if isinstance(decision, Rollback):
            spike = self._state().unanswered_spike
            assert spike is not None
            fields = dataclasses.asdict(decision)
            self._record("segment", why=ledger.SPIKE, onset=spike["onset"], **fields)
            return None
        self._wait_until(lambda: False, decision.pause)
        self._wait_for_room()  # may take days, in which a node that was there may die
        if missing := self._wait_for_nodes():
            return self._give_up(missing)
        return EXIT_PREEMPTED if self._stop_requests.count else self._launch()

    def _check_folder(self) -> None:
        """Raise OSError if the run's folder is gone, which must not be created anew."""
        if not self.run_folder.is_dir():
            gone = "is gone: it was moved or deleted, or its disk is not mounted"
            raise FileNotFoundError(errno.ENOENT, gone, str(self.run_folder))

    def _give_up(self, reason: str) -> int:
        self._record("gave-up", reason=reason)
        return EXIT_FAILED

    def _wait_for_nodes(self) -> str:
        """Wait until every node can start an attempt; else describe those that cannot."""
        if self._node.count == 1 or self._stop_requests.count:
            return ""
        others, seconds = self._other_nodes, self._settings.node_wait_seconds
        port = "port {port} of {address}".format(**self._endpoint)

        def names() -> str:
            return few(map(others.name, others.unavailable()))

        if missing := names():
            said = f"waiting for node {missing} to connect to {port}, for up to {seconds:.0f} s"
            self._print(f"{said}; if its agent runs, check the cable and the firewall")
        self._wait_until(lambda: bool(others.refusals()) or not others.unavailable(), seconds)
        if self._stop_requests.count or not (missing := names()):
            return ""
        reason = f"node {missing} did not connect to {port}, or did not end its processes"
        said = self._agents.last_lines(others.unavailable())
        return others.refusals() or f"{reason}, in {seconds:.0f} s{said}"

    def _wait_for_room(self) -> None:
        """Wait until the disk has room for the next attempt."""
        self._check_not_replaced()
        for left in self.run_folder.glob("checkpoints/*.partial"):  # of an attempt that was ended
            shutil.rmtree(left, ignore_errors=True)
        if lack := self._lack_of_room():
            self._print(f"{lack}; waiting for room")
            self._tell({"kind": notify.WAITING}, f"{lack}; waiting for room")
            self._wait_until(lambda: not self._lack_of_room(), math.inf)

    def _lack_of_room(self) -> str:
        """Describe a disk without room for the next checkpoint, else ""."""
        newest = folder_of(self.run_folder, self._state().resume_step())
        needed = max(_LEAST_BYTES, sum(path.stat().st_size for path in newest.glob("*")))
        free = free_bytes(self.run_folder)
        text = f"{self.run_folder}: has {free:,} bytes free and needs {needed:,}"
        return text if free < needed else ""

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition, `seconds` or a stop request."""
        deadline = time.monotonic() + seconds
        while not (condition() or self._stop_requests.count or time.monotonic() >= deadline):
            self._poll()

    def _poll(self) -> None:
        """Wait for a moment in which the agents are kept running and their reports are read."""
        self._check_not_replaced()
        self._other_nodes.read()
        with contextlib.suppress(OSError):  # tried again
            self._agents.keep(self._other_nodes)
        time.sleep(_POLL_SECONDS)

    def _launch(self) -> int | None:
        """Launch the next attempt and run it to its end."""
        run = self.run_folder
        control_file = launch.next_control_file(self.config, self._node, self._records())
        self._write_control_file(control_file)
        job = launch.start(run, control_file, 0)
        ranks = launch.world_size(self._settings, self._node.count)
        started = f"{count(ranks, 'rank')} through deepspeed"
        self._print(f"attempt {control_file.attempt}: {started}  (log: {job.log})")
        return self._run_to_end(job)

    def _run_to_end(self, job: Job) -> int | None:
        """Watch an attempt, end its processes on all nodes, and record how it ended."""
        stop = dataclasses.replace(job.control_file, state=control.STOP)
        with contextlib.ExitStack() as end:  # backwards, each even if the one before fails
            end.callback(job.end, processes.GRACE_SECONDS)
            end.callback(self._write_control_file, stop)
            problem = self._watch(job)
        # Their ranks may still write down why they ended. `_wait_for_nodes` waits longer.
        deadline = time.monotonic() + processes.GRACE_SECONDS
        while self._other_nodes.busy() and time.monotonic() < deadline:
            self._poll()
        return self._conclude(job, problem)

    def _watch(self, job: Job) -> Problem | None:
        """Wait for the launcher's end; return early if there is a problem."""
        phases = [part.first_step for part in self.config.segments.parts]
        watch = Watch(self.run_folder, job.control_file, self._settings, phases)
        while not job.ended():
            self._poll()
            if self._stop_requests.count:
                self._request_stop(job)
            if problem := self._problem(job, watch):
                return problem
            if watch.lines:
                self._progress.show(watch.lines)
            self._print_news()
        return None

    def _problem(self, job: Job, watch: Watch) -> Problem | None:
        """Return why the attempt has to be ended, if it has to."""
        if self._stop_requests.count > 1 or time.monotonic() > self._saved_by:
            return Problem(CRASH, "it was asked to stop, and the time to save ran out")
        return self._other_nodes.problem(job.control_file.token) or watch.problem()

    def _request_stop(self, job: Job) -> None:
        """Ask the ranks to save and exit, in a limited time."""
        with contextlib.suppress(OSError):  # asked again at the next check
            control.request_stop(self.run_folder, job.control_file.token)
        if self._saved_by == math.inf:
            self._saved_by = time.monotonic() + _SAVE_SECONDS
            self._print(
                f"asked to stop: attempt {job.control_file.attempt} finishes its current step and "
                f"saves, which may take up to {_SAVE_SECONDS:.0f} s; ask again to stop at once, "
                "and lose the steps since the last checkpoint"
            )

    def _conclude(self, job: Job, problem: Problem | None) -> int | None:
        """Record how an attempt ended; return an exit code if the supervisor has to stop."""
        attempt, token = job.control_file.attempt, job.control_file.token
        records = self._records()
        own = [record for record in records if record.get("attempt") == attempt]
        kinds = {record["kind"] for record in own}
        errors = failures.read_failures(self.run_folder, token)
        cause, log = failures.cause(errors), launching.tail(job.log)
        # The cause of a refusal may go away: a full disk, or any after a recipe was accepted.
        code = cause.code if cause else job.code()
        begun = any(record["kind"] == "attempt" for record in decide.since_fork(records))
        if code == EXIT_USAGE and not begun and not self._lack_of_room():
            self._print(f"error: {failures.explain(errors)}" if cause else log)
            self._print(f"log: {job.log}")
            return EXIT_USAGE
        launcher = launching.describe_exit(job.code())
        seen = decide.why_ended(problem, launcher, errors, own[0]["hosts"] if own else ())
        kind = decide.ending(kinds, seen.kind, bool(self._stop_requests.count))
        if kind:
            step = self._state().resume_step()
            self._record(kind, attempt=attempt, step=step, reason=seen.reason)
        self._print_news()
        if kind in (CRASH, decide.HANG):
            details = cause.traceback if cause else f"the end of its log:\n{log}"
            self._print(f"{details.rstrip()}\n(log: {job.log})".lstrip())
        stopped = self._stop_requests.count or decide.PREEMPTED in kinds
        return EXIT_PREEMPTED if stopped and "done" not in kinds else None

    def _release_nodes(self, code: int) -> None:
        """Make the agents of the other nodes exit."""
        if self._node.count > 1:
            self._write_control_file(ControlFile(secrets.token_hex(8), 0, control.EXIT, code=code))
            self._agents.close(processes.GRACE_SECONDS)

    def _write_control_file(self, control_file: ControlFile) -> None:
        """Replace the control file, as written by this start."""
        self._check_not_replaced()
        control.write(self.run_folder, dataclasses.replace(control_file, start=self._agents.start))

    def _check_not_replaced(self) -> None:
        """Raise if another supervisor has taken the run over, before anything is changed.

        Where locks do not hold between machines, or not longer than a machine is silent, one may
        do so while this machine stands still.

        Raises:
            ValueError: another one has; the message says what to do.
        """
        newest = control.try_read(self.run_folder)
        if newest and newest != self._found and newest.start != self._agents.start:
            raise ValueError(
                f"{self.run_folder}: another supervisor has taken this run over, as this one was "
                "silent; leave the run to it, or end it before you start this one again"
            )

    def _records(self) -> list[ledger.Record]:
        return ledger.read_ledger(self.ledger)

    def _state(self) -> ledger.RunState:
        return ledger.run_state(self._records())

    def _record(self, kind: str, **fields: object) -> None:
        self._check_not_replaced()
        ledger.append(self.ledger, kind, **fields)
        self._print_news()

    def _print_news(self) -> None:
        """Print what was added to the ledger and to validation.jsonl since the last call."""
        with contextlib.suppress(OSError):  # printed when the file grows again
            grown = self._has_grown(self._validation)
            if lines := metrics.surviving(metrics.read_metrics(self._validation) if grown else []):
                self._print(wording.validation_line(lines))
            if self._has_grown(self.ledger):
                news = ledger.read_ledger(self.ledger)[self._records_printed :]
                self._records_printed += len(news)
                for record, sentence in history.sentences(news):
                    self._print(sentence)
                    self._tell(record, sentence)

    def _tell(self, record: ledger.Record, sentence: str) -> None:
        try:
            notify.tell(self.config.notify.command, self.run_folder, record, sentence)
        except (OSError, subprocess.SubprocessError) as error:
            self._print(f"WARNING: notify.command: {error}")

    def _has_grown(self, path: Path) -> bool:
        """Return whether a file has grown since the last call."""
        before, self._sizes[path] = self._sizes[path], _size(path)
        return self._sizes[path] > before


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def forecast(course: Course, node: Node = _ONLY_NODE) -> str:
    """Describe what a supervisor would do next, and with which command; change nothing.

    Args:
        course: of the run.
        node: this one.

    Raises:
        ValueError: The ledger does not verify.
    """
    config, run = course.config, Path(course.config.folder)
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    if job := launch.find(run, control.read_control_file(run)):
        return f"next: watch attempt {job.control_file.attempt}, which is running\n"
    if held := run_folder.holder(run):
        return f"next: nothing here, {held} trains it\n"
    decision = None if course.goes_on else decide.decide(records, config)
    if isinstance(decision, Rollback):
        return f"next: roll back to step {decision.step:,}, with seed {decision.seed}\n"
    if isinstance(decision, GiveUp):
        return f"next: give up: {decision.reason}\n"
    if isinstance(decision, decide.Finished):
        return "next: nothing, the run is finished\n"
    step = course.source.step if course.goes_on else ledger.run_state(records).resume_step()
    command = launch.command(run, launch.next_control_file(config, node, records))
    return f"next: launch an attempt\nfrom step {step}: {' '.join(command)}\n"
