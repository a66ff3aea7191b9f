"""Launch a run, watch it, and bring it to its end: `python -m pretrain supervise`.

The supervisor starts attempts through a launcher, never trains itself, and needs no torch. What to
do next follows from the ledger alone (ladders.py): the launcher's exit code can lie, deepspeed's
reports success when its own middle process is killed. Who watches: watch.py. Who acts: here, and
agent.py on the other machines. Read `Supervisor._next`, then `_see_through`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from data_prep import files
from pretrain.config.run import RunConfig
from pretrain.exit_codes import EXIT_PREEMPTED
from pretrain.run import folder as run_folder
from pretrain.run import ledger, metrics, status
from pretrain.spikes.policy import GiveUp, Rollback
from pretrain.supervision import control as orders
from pretrain.supervision import decide as ladders
from pretrain.supervision import failures, jobs, launch, processes
from pretrain.supervision.control import Order
from pretrain.supervision.failures import RankError
from pretrain.supervision.jobs import Job
from pretrain.supervision.nodes import Others, Place
from pretrain.supervision.watch import COUNT_SECONDS, Complaint, StoppedProcesses, Watch, complain

LOCK = "supervisor.lock"
EXIT_FINISHED, EXIT_GAVE_UP, EXIT_USAGE = 0, 1, 2
_DISK_SECONDS, _LEAVING_SECONDS = 600.0, 10.0
"""How long a full disk is waited for, and how long where it was asked to leave."""
_ALONE = Place()
T = TypeVar("T")


class Supervisor:
    """Brings one run to its end."""

    def __init__(
        self,
        config: RunConfig,
        place: Place = _ALONE,
        write: Callable[[str], object] = lambda text: sys.stdout.write(text),
        poll_seconds: float = 0.5,
        progress_seconds: float = 10.0,
    ) -> None:
        """Take the run's folder for ourselves.

        Args:
            config: the recipe.
            place: this machine among the run's, whose first it is.
            write: takes what is said.
            poll_seconds: between two looks at a running attempt.
            progress_seconds: between two lines about it.

        Raises:
            ValueError: another supervisor has the folder, there is no launcher, it would start
                all machines by itself and `place` has several, or there are too few GPUs.
        """
        from pretrain.config.load import dump

        launch.refuse_agents(config.supervision, place.count)
        launch.find_launcher(config.supervision)
        launch.refuse_gpus(config)
        self.config, self.run_folder, self._place = config, Path(config.folder), place
        self.ledger = self.run_folder / ledger.FILE_NAME
        self._write, self._poll, self._progress = write, poll_seconds, progress_seconds
        self._requests = orders.Requests()
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self._lock = files.lock(self.run_folder / LOCK, "is in use by another supervisor")
        dump(config, self.run_folder / launch.RECIPE)
        silence = config.supervision.node_silence_seconds
        self._others = Others(self.run_folder, place.count, silence)
        self._told, self._size = len(ledger.read(self.ledger)), -1

    def run(self) -> int:
        """Launch until the run is finished, given up or to be left, and let go of it.

        Returns:
            The exit code: 0 finished, 1 given up, 2 wrongly written, 76 asked to leave.

        Raises:
            ValueError: the ledger does not verify, or somebody trains the run by hand.
            KeyboardInterrupt: on Ctrl-C; nothing of the run is left behind.
        """
        with self._lock, self._requests.counted():
            processes.adopt_orphans()
            try:
                code = self._take_over()
                while code is None:
                    code = self._next()
            except KeyboardInterrupt:
                self._requests.count += 1  # a full disk is not waited for long
                processes.end_all(self.run_folder)  # it may have come just after a launch
                with contextlib.suppress(OSError):
                    self._record_open("interrupted", "the supervisor received SIGINT (Ctrl-C)")
                    self._dismiss(EXIT_GAVE_UP)
                raise
            except OSError as error:  # after `_wait_for_disk` has waited
                self._say(f"stopped: {error}; start it again when that is mended")
                with contextlib.suppress(OSError):
                    self._dismiss(EXIT_GAVE_UP)
                return EXIT_PREEMPTED if self._requests.count else EXIT_GAVE_UP
            self._dismiss(code)
            return code

    def _take_over(self) -> int | None:
        """Go on with an attempt whose supervisor is gone, or clear away what it left."""
        order = self._wait_for_disk(lambda: orders.read(self.run_folder))
        job = jobs.find(self.run_folder, order)
        if job and order:
            self._say(f"attempt {order.attempt} still runs; watching it")
            return self._see_through(job, order)
        if order and order.state == orders.RUN:
            self._give(dataclasses.replace(order, state=orders.STOP))
        processes.end_all(self.run_folder, self.config.supervision.grace_seconds)
        run_folder.lock(self.run_folder).close()  # held: somebody trains it by hand
        errors = failures.read(self.run_folder, order.token) if order else []
        reason = failures.explain(errors, 0) or "it ended while nobody watched"
        self._record_open(ladders.CRASH, reason)
        state = ledger.run_state(self._records(), self.config.training.seed)
        self._wait_for_disk(lambda: run_folder.reject_damaged_result(self.run_folder, state))
        self._tell_news()
        return None

    def _next(self) -> int | None:
        """Do what the ledger asks for; an exit code where that is to end."""
        decision = ladders.decide(self._records(), self.config)
        if isinstance(decision, ladders.Finished):
            self._say("finished")
            return EXIT_FINISHED
        if isinstance(decision, GiveUp):
            return self._give_up(decision.reason)
        if isinstance(decision, Rollback):
            self._roll_back(decision)
            return None
        if not self._wait_until(lambda: False, decision.pause) and self._requests.count:
            return EXIT_PREEMPTED
        return self._attempt()

    def _give_up(self, reason: str) -> int:
        self._record("gave-up", reason=reason)
        self._tell_news()
        return EXIT_GAVE_UP

    def _roll_back(self, decision: Rollback) -> None:
        spike = ledger.run_state(self._records(), self.config.training.seed).unanswered_spike
        assert spike is not None
        fields = dataclasses.asdict(decision)
        self._record("rollback", onset=spike["onset"], **fields)
        self._tell_news()

    def _attempt(self) -> int | None:
        """Launch the next attempt and see it through."""
        missing = self._wait_for_others()
        if self._requests.count:
            return EXIT_PREEMPTED
        if missing:
            return self._give_up(missing)
        for lock in processes.clear_build_locks(processes.extensions_folder(os.environ)):
            self._say(f"{lock}: deleted, its build was killed")
        order = launch.next_order(self.config, self._place, self._records())
        if order.nodes > 1:
            launch.write_hostfile(self.run_folder, order.nodes)
        self._give(order)
        log = jobs.log_of(self.run_folder, order.attempt)
        job = self._wait_for_disk(lambda: jobs.start(self.config, self.run_folder, order, 0, log))
        words = launch.command(self.config, self.run_folder, order)
        self._say(f"attempt {order.attempt}: {' '.join(words)}  (log: {log})")
        return self._see_through(job, order)

    def _wait_for_others(self) -> str:
        """Wait until every machine can take an attempt; says which could not for too long."""
        if self._place.count == 1:
            return ""
        self._say(f"waiting for {metrics.count(self._place.count - 1, 'other node')}")
        seconds = self.config.supervision.node_wait_seconds
        if self._wait_until(lambda: not self._missing(), seconds):
            return ""
        nodes = ", ".join(map(str, self._missing()))
        return f"node {nodes} did not come, or did not get rid of its processes, in {seconds:.0f} s"

    def _missing(self) -> list[int]:
        self._others.look()
        return self._others.missing()

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait so long for a condition, or until we are asked to leave; whether it came true."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= deadline or self._requests.count:
                return False
            time.sleep(min(self._poll, 0.1))
        return True

    def _see_through(self, job: Job, order: Order) -> int | None:
        """Watch an attempt, end all of it, and record how it ended."""
        try:
            complaint = self._wait(job, order)
        finally:
            stop = dataclasses.replace(order, state=orders.STOP)
            with contextlib.suppress(OSError):  # whatever the disk says, no process may be left
                orders.give(self.run_folder, stop)
            job.end(self.config.supervision.grace_seconds)
            self._give(stop)
            self._wait_until_idle()
        return self._conclude(job, order, complaint)

    def _wait_until_idle(self) -> None:
        """Until no other machine that lives has processes of the attempt."""
        while self._place.count > 1:
            self._others.look()
            if not self._others.busy():
                break
            time.sleep(self._poll)

    def _wait(self, job: Job, order: Order) -> Complaint | None:
        """Wait for the attempt's end; says why it has to be ended if it does not end by itself."""
        watch = Watch(self.run_folder, order.token, self.config.supervision)
        stopped = StoppedProcesses(self.config.supervision.hang_seconds)
        next_line = next_count = 0.0
        said: object = None
        deadline = math.inf
        while not job.ended():
            time.sleep(self._poll)
            self._tell_news()
            now = time.monotonic()
            if self._requests.count:
                deadline = self._ask_to_leave(order, deadline)
            complaint = self._complain(watch, order, deadline)
            if complaint is None and now >= next_count:
                next_count = now + COUNT_SECONDS
                complaint = self._count(watch, stopped, job)
            if complaint:
                return complaint
            if watch.lines and watch.lines[-1] is not said and now >= next_line:
                next_line, said = now + self._progress, watch.lines[-1]
                self._say(metrics.progress_line(watch.lines, self.config.training.steps))
        return None

    def _count(self, watch: Watch, stopped: StoppedProcesses, job: Job) -> Complaint | None:
        """What is wrong with the attempt's processes on this machine, if anything is."""
        members = job.members()
        gone = watch.count({member.rank for member in members if member.rank})
        return complain(ladders.CRASH, gone) or complain(ladders.HANG, stopped.look(members))

    def _complain(self, watch: Watch, order: Order, deadline: float) -> Complaint | None:
        """What is wrong with an attempt, if anything is."""
        if self._requests.count > 1 or time.monotonic() > deadline:
            return Complaint(ladders.CRASH, "it was asked to leave, and had no more time to save")
        self._others.look()
        missed = complain(ladders.CRASH, self._others.complaint(order.token))
        hung = self._others.stopped(order.token) or watch.look()
        return missed or complain(ladders.HANG, hung)

    def _ask_to_leave(self, order: Order, deadline: float) -> float:
        """Ask the ranks to save and leave; returns until when they may take."""
        with contextlib.suppress(OSError):  # asked again at the next look
            orders.request_stop(self.run_folder, order.token)
        if deadline < math.inf:
            return deadline
        seconds = self.config.supervision.preemption_seconds
        self._say(
            f"asked to leave: attempt {order.attempt} is to save at its step's end, within "
            f"{seconds:.0f} s (ask again to leave at once)"
        )
        return time.monotonic() + seconds

    def _conclude(self, job: Job, order: Order, complaint: Complaint | None) -> int | None:
        records, log = self._records(), jobs.log_of(self.run_folder, order.attempt)
        told = {record["kind"] for record in ladders.records_of(records, order.token)}
        errors = failures.read(self.run_folder, order.token)
        cause = failures.cause(errors)
        # What was right once is not wrong now: a disk may be full, or away for a while.
        code = cause.code if cause else job.code()
        if code == EXIT_USAGE and order.attempt == 1 and not told:
            words = f"error: {failures.in_words(cause, errors)}" if cause else jobs.tail(log)
            self._say(words)
            return EXIT_USAGE
        seen = self._why(job, order, complaint, errors)
        kind = ladders.ending(told, seen.kind, bool(self._requests.count))
        if kind:
            step = ledger.run_state(records, self.config.training.seed).resume_step()
            fields = {"attempt": order.attempt, "step": step, "reason": seen.reason}
            self._record(kind, **fields)
        self._tell_news()
        if kind in (ladders.CRASH, ladders.HANG):
            words = f"the end of its log:\n{jobs.tail(log)}"
            self._say(f"{cause.traceback or cause.message}\n(log: {log})" if cause else words)
        leave = self._requests.count or ladders.PREEMPTED in told
        return EXIT_PREEMPTED if leave and "done" not in told else None

    def _why(
        self,
        job: Job,
        order: Order,
        complaint: Complaint | None,
        errors: Sequence[RankError],
    ) -> Complaint:
        """Why an attempt ended: a rank's error, else what was seen of it, else the exit code."""
        begun = ladders.records_of(self._records(), order.token)
        words = failures.explain(errors, begun[0]["ranks"] if begun else 0)
        if failures.cause(errors):
            return Complaint(ladders.CRASH, words)
        ended = f"the launcher {job.how_ended()} and the run is not done"
        seen = complaint or Complaint(ladders.CRASH, ended)
        if words and seen.kind == ladders.CRASH:
            return Complaint(seen.kind, f"{words}; {seen.reason}")
        return seen

    def _record_open(self, kind: str, reason: str) -> None:
        """Say how the newest attempt ended, if nothing in the ledger does."""
        attempt = ladders.open_attempt(self._records())
        if attempt:
            number, step = attempt["attempt"], attempt["step"]
            self._record(kind, attempt=number, step=step, reason=reason)
            self._tell_news()

    def _dismiss(self, code: int) -> None:
        """Let the other machines' agents leave."""
        if self._place.count > 1:
            token = secrets.token_hex(8)
            self._give(Order(token, 0, orders.OVER, code=code))

    def _records(self) -> list[ledger.Record]:
        return self._wait_for_disk(lambda: ledger.read(self.ledger))

    def _record(self, kind: str, **fields: object) -> None:
        self._wait_for_disk(lambda: ledger.append(self.ledger, kind, **fields))

    def _give(self, order: Order) -> None:
        self._wait_for_disk(lambda: orders.give(self.run_folder, order))

    def _wait_for_disk(self, action: Callable[[], T]) -> T:
        """Return `action()`; where the disk is full, or away, wait for it for some minutes."""
        began, said = time.monotonic(), ""
        while True:
            try:
                return action()
            except OSError as error:
                limit = _LEAVING_SECONDS if self._requests.count else _DISK_SECONDS
                if time.monotonic() - began >= limit:
                    raise
                if str(error) != said:
                    said = str(error)
                    self._say(f"{said}; trying again for up to {limit:.0f} s")
                time.sleep(self._poll)

    def _tell_news(self) -> None:
        """Say what is new in the ledger, which is read only when it has changed."""
        try:
            size = self.ledger.stat().st_size
            records = ledger.read(self.ledger) if size != self._size else []
        except OSError:  # there is none yet, or it cannot be read now
            return
        if size == self._size:
            return
        for _, words in status.history(records[self._told :]):
            self._say(words)
        self._told, self._size = len(records), size

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody may be listening any more
            self._write(f"[supervisor] {text}\n")
            sys.stdout.flush()


def forecast(config: RunConfig, place: Place = _ALONE) -> str:
    """What a supervisor would do next, and with which command; nothing is changed.

    Raises:
        ValueError: the ledger does not verify, there is no launcher, or there are too few GPUs.
    """
    launch.refuse_gpus(config)
    run = Path(config.folder)
    records = ledger.read(run / ledger.FILE_NAME)
    order = orders.read(run)
    if order and jobs.find(run, order):
        return f"attempt {order.attempt} runs: it would be watched\n"
    decision = ladders.decide(records, config)
    words = f"next: {decision}\n"
    if isinstance(decision, ladders.Launch):
        state = ledger.run_state(records, config.training.seed)
        command = launch.command(config, run, launch.next_order(config, place, records))
        words += f"from step {state.resume_step()}: {' '.join(command)}\n"
    return words
