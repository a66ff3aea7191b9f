"""Launch a run, watch it, and bring it to its end: `python -m pretrain supervise`.

The supervisor starts attempts through the `deepspeed` launcher, never trains itself, and needs no
torch. What to do next follows from the ledger alone (`decide`): the launcher's exit code can lie,
it reports success when its own middle process is killed. Read `decide`, then `Supervisor`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep import files
from pretrain import ledger, metrics, spikes
from pretrain.config import RunConfig

RUN_VARIABLE = "ZEROCLAP_RUN"
"""Environment variable that marks every process of a run, so that none is left behind."""
LOCK = "supervisor.lock"


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start the next attempt from the newest surviving checkpoint."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """The last step is done and saved."""


Decision = Launch | Finished | spikes.Rollback | spikes.GiveUp


def decide(records: Sequence[ledger.Record], config: RunConfig) -> Decision:
    """What a ledger asks for, when no attempt is running."""
    state = ledger.fold(records, config.training.seed)
    if state.done:
        return Finished()
    newest_spike = state.spikes[-1]["number"] if state.spikes else -1
    newest_rollback = state.rollbacks[-1]["number"] if state.rollbacks else -1
    if newest_spike > newest_rollback:
        return spikes.plan(
            onset=state.spikes[-1]["onset"],
            checkpoints=state.checkpoints,
            seeds=sorted(state.seeds),
            rollbacks=len(state.rollbacks),
            policy=config.spike,
        )
    crashes = crashes_without_progress(records)
    if len(crashes) > config.spike.max_crashes:
        return spikes.GiveUp(
            f"{len(crashes)} attempts ended without a new checkpoint, the last one because "
            f"{crashes[-1]['reason']}"
        )
    return Launch()


def crashes_without_progress(records: Sequence[ledger.Record]) -> list[ledger.Record]:
    """The crashes since the last checkpoint or rollback, or since somebody started it again."""
    crashes: list[ledger.Record] = []
    for record in records:
        if record["kind"] in ("commit", "rollback", "gave-up"):
            crashes = []
        elif record["kind"] == "crash":
            crashes.append(record)
    return crashes


def gpu_count() -> int:
    """GPUs of this machine that we may use, found without torch."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([device for device in visible.split(",") if device.strip()]))


def default_ranks() -> int:
    """One a GPU of this machine, or two where there is none."""
    return gpu_count() or 2


def launch_command(config: RunConfig, run: Path, port: int) -> list[str]:
    """The launcher's command line for one attempt."""
    beside = Path(sys.executable).with_name("deepspeed")
    program = str(beside) if beside.is_file() else shutil.which("deepspeed")
    if program is None:
        raise ValueError(
            f"no `deepspeed` launcher beside {sys.executable} nor on PATH; install the package "
            "deepspeed into this environment"
        )
    ranks = config.training.ranks or default_ranks()
    return [
        program,
        "--num_gpus",
        str(ranks),
        "--master_port",
        str(port),
        "--module",
        "pretrain.train",
        str(run / "supervised.yaml"),
    ]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(run: Path) -> list[int]:
    """Process ids that carry this run's mark in their environment, ours left out."""
    import psutil

    mark = str(run.resolve())
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == mark:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def end_processes(run: Path, grace_seconds: float = 10.0) -> None:
    """End every process of a run, politely and then not, and make sure that none is left.

    The launcher leaves its ranks alive when it is terminated, so each is told by itself.
    """
    deadline = time.monotonic() + grace_seconds
    message = signal.SIGTERM
    while left := processes_of(run):
        if time.monotonic() > deadline:
            message = signal.SIGKILL
        for pid in left:
            try:
                os.kill(pid, message)
            except ProcessLookupError:
                continue
        time.sleep(0.2)


class Supervisor:
    """Brings one run to its end."""

    def __init__(
        self,
        config: RunConfig,
        write: Callable[[str], object] = lambda text: sys.stdout.write(text),
        poll_seconds: float = 0.5,
        progress_seconds: float = 10.0,
    ) -> None:
        """Take the run's folder for ourselves.

        Raises:
            ValueError: another supervisor has it.
        """
        from pretrain.recipe import dump

        self.config, self.run_folder = config, Path(config.folder)
        self.ledger = self.run_folder / ledger.FILE_NAME
        self._write, self._poll, self._progress = write, poll_seconds, progress_seconds
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self._lock = files.lock(self.run_folder / LOCK, "is in use by another supervisor")
        dump(config, self.run_folder / "supervised.yaml")

    def run(self) -> int:
        """Launch until finished or given up, then let go of the run; returns the exit code."""
        with self._lock:
            return self._bring_to_end()

    def _bring_to_end(self) -> int:
        # To be terminated is to leave by the same way as an interrupt: no rank stays behind.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        end_processes(self.run_folder)  # of an attempt whose supervisor was killed
        while True:
            records = ledger.read(self.ledger)
            decision = decide(records, self.config)
            if isinstance(decision, Finished):
                self._say("finished")
                return 0
            if isinstance(decision, spikes.GiveUp):
                ledger.append(self.ledger, "gave-up", reason=decision.reason)
                self._say(f"gave up: {decision.reason}")
                return 1
            if isinstance(decision, spikes.Rollback):
                self._roll_back(decision)
            else:
                usage_error = self._attempt()
                if usage_error:
                    return usage_error

    def _roll_back(self, decision: spikes.Rollback) -> None:
        ledger.append(self.ledger, "rollback", step=decision.step, seed=decision.seed)
        target = f"the checkpoint of step {decision.step}" if decision.step else "initial weights"
        self._say(f"rolling back to {target}, going on with seed {decision.seed}")

    def _attempt(self) -> int:
        """Run one attempt and record how it ended; non-zero where relaunching cannot help."""
        before = ledger.read(self.ledger)
        number = ledger.fold(before, self.config.training.seed).attempts + 1
        log = self.run_folder / "logs" / f"attempt-{number:03d}.log"
        log.parent.mkdir(exist_ok=True)
        command = launch_command(self.config, self.run_folder, free_port())
        self._say(f"attempt {number}: {' '.join(command)}  (log: {log})")
        environment = {**os.environ, RUN_VARIABLE: str(self.run_folder.resolve())}
        if not gpu_count():
            environment.setdefault("DS_ACCELERATOR", "cpu")
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
            try:
                hung = self._wait(process, log)
            finally:
                end_processes(self.run_folder)
            code = process.wait()
        began = [r for r in ledger.read(self.ledger)[len(before) :] if r["kind"] == "attempt"]
        if code == 2 and not began:
            self._write(_tail(log))
            return code
        kinds = {r["kind"] for r in ledger.read(self.ledger)[len(before) :]}
        if not kinds & {"done", "spike"}:
            reason = hung or f"the launcher ended with code {code} and the run is not done"
            ledger.append(self.ledger, "crash", attempt=number, reason=reason)
            self._say(f"attempt {number} failed: {reason}; the end of its log:\n{_tail(log)}")
        return 0

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> str:
        """Wait for the attempt's end, printing progress; says why if it hangs."""
        path = self.run_folder / metrics.METRICS
        follower = _Follower(path)
        ledger_seen = len(ledger.read(self.ledger))
        next_line, alive = 0.0, time.monotonic()
        size = -1
        while process.poll() is None:
            time.sleep(self._poll)
            now = time.monotonic()
            records = ledger.read(self.ledger)
            for record in records[ledger_seen:]:
                self._tell(record)
            ledger_seen = len(records)
            line = follower.newest()
            total = log.stat().st_size + (path.stat().st_size if path.exists() else 0)
            if total != size:
                size, alive = total, now
            if now - alive > self.config.spike.hang_seconds:
                return f"nothing was heard of it for {self.config.spike.hang_seconds:.0f} s"
            if line is not None and now >= next_line:
                next_line = now + self._progress
                self._say(metrics.progress_line(line, self.config.training.steps))
        for record in ledger.read(self.ledger)[ledger_seen:]:
            self._tell(record)
        return ""

    def _tell(self, record: ledger.Record) -> None:
        kind = record["kind"]
        if kind in ("suspect", "healed", "spike"):
            names = {"suspect": "suspicion", "healed": "healed", "spike": "LOSS SPIKE"}
            self._say(
                f"{names[kind]} at step {record['step']}: loss {record['loss']:.2f} against "
                f"{record['baseline']:.2f}, since step {record['onset']}"
            )
        elif kind in ("save-failed", "discontinuity"):
            self._say(f"WARNING, {kind} at step {record['step']}: {record['reason']}")
        elif kind == "reject":
            self._say(f"checkpoint of step {record['step']} rejected: {record['reason']}")

    def _say(self, text: str) -> None:
        self._write(f"[supervisor] {text}\n")
        sys.stdout.flush()


class _Follower:
    """The newest whole line of a growing JSON Lines file, without reading it twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def newest(self) -> dict[str, object] | None:
        """The newest line since the last call, if there is one."""
        import json

        if not self._path.exists():
            return None
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        lines = data[:whole].splitlines()
        return json.loads(lines[-1]) if lines else None


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) + "\n"
