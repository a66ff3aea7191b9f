"""Control files: how the supervisor, the ranks and the agents of other nodes communicate.

They are small files in the run's folder `control/`, and each but the stop request has one writer:

    control.json             which attempt may train, where, and whether it is to stop
    stop-TOKEN               request to an attempt to save and exit after the current step
    heartbeat.json           what rank 0 is doing (heartbeat.py)
    failure-TOKEN-RANK.json  the error of a rank (failures.py)
    train.lock.json          who trains: host, process, time (folder.py)
    supervisor.lock.json     who supervises, likewise, and where agents report (nodes.py)

A network file system may refuse to read a file while it is being replaced. Readers then keep what
they knew and try again later.
"""

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.common import children, files

FOLDER = "control"
FILE_NAME = "control.json"
TOKEN_VARIABLE = "ZEROCLAP_ATTEMPT"
"""Environment variable of an attempt's processes: the token of the attempt."""

_SAME_REQUEST_SECONDS = 3.0
RUN, STOP, EXIT = "run", "stop", "exit"


@dataclasses.dataclass(frozen=True)
class ControlFile:
    """The supervisor's instructions to every node of a run."""

    token: str
    """Identifies the attempt; never used twice."""
    attempt: int
    state: str
    """`run` the attempt, `stop` (end its processes), or `exit` (agents exit)."""
    nodes: int = 1
    processes_per_node: int = 1
    address: str = "127.0.0.1"
    """Of the node of rank 0."""
    port: int = 0
    device: str = "cpu"
    """What the ranks of this node use, "cpu" or "cuda"."""
    threads: str = "1"
    """OMP_NUM_THREADS of each rank on a CPU, with several nodes."""
    code: int = 0
    """Exit code of the agents in state `exit`."""
    start: str = ""
    """Token of the supervisor's start; the agents that it starts serve this start only."""


def folder_of(run: Path) -> Path:
    """Return the folder of a run's control files."""
    return run / FOLDER


def write(run: Path, control_file: ControlFile) -> None:
    """Replace the control file, and delete the requests and failures of other attempts.

    What killed processes had not finished writing goes as well; a living one writes it again.
    """
    folder = folder_of(run)
    folder.mkdir(exist_ok=True)  # but not the run's, which may have been moved
    for path in (p for kind in ("stop", "failure") for p in folder.glob(f"{kind}-*")):
        if path.name.split("-")[1] != control_file.token:
            path.unlink(missing_ok=True)
    for path in folder.glob(".*.json.*"):
        path.unlink(missing_ok=True)
    files.write_json(folder / FILE_NAME, dataclasses.asdict(control_file))


def read_control_file(run: Path) -> ControlFile | None:
    """Read the control file; return `None` if there is none.

    Raises:
        ValueError: The file holds other fields than those that `write` writes.
        OSError: The file cannot be read now.
    """
    path = folder_of(run) / FILE_NAME
    values = parse_object(files.read_bytes(path))
    try:
        return None if values is None else ControlFile(**values)
    except TypeError as error:
        raise ValueError(
            f"{path}: is not a control file of this version ({error}); delete it if no process "
            "trains this run"
        ) from None


def try_read(run: Path) -> ControlFile | None:
    """Read the control file; return `None` if there is none, or it cannot be read now."""
    with contextlib.suppress(OSError):
        return read_control_file(run)
    return None


def token_of(environ: Mapping[str, str]) -> str:
    """Return the token of the attempt that a process belongs to; "" without a supervisor."""
    return environ.get(TOKEN_VARIABLE, "")


def superseded(run: Path, token: str) -> ControlFile | None:
    """Return the control file if it stops the attempt with this token, or starts another one.

    An attempt without a supervisor (token "") cannot be superseded, and a control file that cannot
    be read now supersedes no attempt. Cheap enough to call once a second.
    """
    newest = try_read(run) if token else None
    return newest if newest and (newest.token, newest.state) != (token, RUN) else None


def check_not_superseded(run: Path, token: str) -> None:
    """Raise if the attempt with this token was superseded.

    Called before an attempt starts, commits a checkpoint or appends to the ledger. The ledger
    itself refuses an attempt only after a later one has begun.

    Raises:
        ValueError: The attempt was superseded; the message names the newest attempt.
    """
    if newest := superseded(run, token):
        raise ValueError(
            f"{run}: this attempt was superseded (the newest is attempt {newest.attempt}); "
            "this one stops"
        )


def _stop_file(run: Path, token: str) -> Path:
    return folder_of(run) / f"stop-{token}"


def request_stop(run: Path, token: str) -> None:
    """Ask an attempt to save and exit after the current step."""
    folder_of(run).mkdir(exist_ok=True)
    _stop_file(run, token).touch()


def stop_requested(run: Path, token: str) -> bool:
    """Return whether the attempt was asked to stop; one `stat`, cheap enough for every step."""
    return os.path.exists(_stop_file(run, token))  # where it cannot be told, the next step asks


@dataclasses.dataclass
class StopRequests:
    """Counts how often a supervisor or an agent was asked to stop.

    Each `children.stop_signals` is one, but those within `_SAME_REQUEST_SECONDS` of a request
    belong to it: Slurm sends one to every process of a job step, and the job's script may forward
    another.
    """

    count: int = 0

    def counted(self) -> contextlib.AbstractContextManager[None]:
        """Count the stop signals that arrive in this block, without ending the process."""
        requested = -math.inf

        def count(number: int, frame: object) -> None:
            nonlocal requested
            now = time.monotonic()
            if now - requested > _SAME_REQUEST_SECONDS:
                requested = now
                self.count += 1

        return children.stop_signals(count)


def stop_on_signals(run: Path, token: str, environ: Mapping[str, str]) -> None:
    """Make this rank treat SIGUSR1 as a request to stop; directly under srun, SIGTERM as well.

    The deepspeed launcher and torchrun send SIGTERM to end the ranks of a failed attempt, which
    must not wait. srun forwards the SIGTERM that Slurm sends before it revokes the allocation.
    """

    def request(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # on a full disk the rank continues
            request_stop(run, token)

    signal.signal(signal.SIGUSR1, request)
    under_srun = {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= environ.keys()
    if under_srun and not {"CROSS_RANK", "TORCHELASTIC_RUN_ID"} & environ.keys():
        signal.signal(signal.SIGTERM, request)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; return `None` if there is no valid one, or it cannot be read now."""
    with contextlib.suppress(OSError):
        return parse_object(path.read_bytes())
    return None


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Parse a JSON object, or return `None` where `data` is none."""
    with contextlib.suppress(ValueError):
        return files.parse_json(data)
    return None


@contextlib.contextmanager
def repeated(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    """Call `action` in a thread, now and every `seconds`, until this block ends.

    An error is printed once, and the next call may succeed: these calls tell others who is alive.
    """
    left = threading.Event()

    def repeat() -> None:
        printed = ""
        while True:
            try:
                action()
            except Exception as error:
                if repr(error) != printed:
                    printed = repr(error)
                    traceback.print_exc()
            if left.wait(seconds):
                return

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join(seconds)  # it may wait for an unavailable file system
