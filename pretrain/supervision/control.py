"""What supervisor, trainer and other machines' agents tell each other: small files in `control/`.

    order.json         who may train now (its token fences off every other), where, and when to stop
    stop-TOKEN         please save and leave at the next step's end
    failure-TOKEN-RANK.json  why a rank ended (failures.py)
    heartbeat.json     what rank 0 is doing (heartbeat.py)
    node-NNN.json      what another machine's agent is doing (nodes.py)
    launched-NNN.json  a machine's launcher, for whoever has to find it again (jobs.py)

The ledger has one writer at a time, the trainer while there is one; here each file has its own.
A network file system may refuse to read a file while it is replaced: that says nothing new, and
the reader looks again later. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep import files

FOLDER = "control"
TOKEN_VARIABLE = "ZEROCLAP_ATTEMPT"
"""Environment variable with the token of the order that started a process."""

_LEAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
RUN, STOP, OVER = "run", "stop", "over"


@dataclasses.dataclass(frozen=True)
class Order:
    """What every machine of a run is to do."""

    token: str
    """Of the attempt; no two have the same."""
    attempt: int
    state: str
    """run, stop (end the attempt's processes), or over (agents leave)."""
    nodes: int = 1
    processes_per_node: int = 1
    """Of each machine."""
    address: str = "127.0.0.1"
    """Of the machine of rank 0."""
    port: int = 0
    code: int = 0
    """With which agents leave when it is over."""


def folder_of(run: Path) -> Path:
    """Where a run's control files lie."""
    return run / FOLDER


def give(run: Path, order: Order) -> None:
    """Make an order the one that counts; what belongs to earlier attempts is deleted."""
    folder = folder_of(run)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("stop-*"), *folder.glob("failure-*")):
        if path.name.split("-")[1] != order.token:
            path.unlink(missing_ok=True)
    data = files.strict_json(dataclasses.asdict(order)).encode() + b"\n"
    files.write_atomically(folder / "order.json", data)


def read(run: Path) -> Order | None:
    """The order that counts; `None` where there is none.

    Raises:
        ValueError: the file is not one that `give` wrote.
        OSError: it cannot be read now.
    """
    try:
        values = _mapping(files.retried((folder_of(run) / "order.json").read_bytes))
    except FileNotFoundError:
        return None
    if values is None:
        return None
    try:
        return Order(**values)
    except TypeError as error:
        path = folder_of(run) / "order.json"
        raise ValueError(f"{path}: is no order ({error}); delete it when nothing trains") from None


def token_of(environ: Mapping[str, str]) -> str:
    """The token that a process was started with; "" where nobody ordered it."""
    return environ.get(TOKEN_VARIABLE, "")


def superseded(run: Path, token: str) -> Order | None:
    """The order that ended an attempt which was ordered (`token` is not ""), or that replaced it.

    Cheap enough for once a second. An order that cannot be read now supersedes nobody.
    """
    order = None
    with contextlib.suppress(OSError):
        order = read(run) if token else None
    return order if order and (order.token != token or order.state != RUN) else None


def refuse_superseded(run: Path, token: str) -> None:
    """Refuse to start, commit or tell anything on an order that counts no more.

    The ledger refuses an attempt when a later one has begun; this one when it has been ordered.

    Raises:
        ValueError: names the attempt that was ordered since.
    """
    if order := superseded(run, token):
        raise ValueError(
            f"{run}: the order that started this attempt no longer counts (the newest is that of "
            f"attempt {order.attempt}); this one stops"
        )


def _stop_file(run: Path, token: str) -> Path:
    return folder_of(run) / f"stop-{token}"


def request_stop(run: Path, token: str) -> None:
    """Ask an attempt to save and leave at the end of its step."""
    folder_of(run).mkdir(parents=True, exist_ok=True)
    _stop_file(run, token).touch()


def stop_requested(run: Path, token: str) -> bool:
    """Whether somebody asked; a `stat`, cheap enough for every step."""
    try:
        return _stop_file(run, token).exists()
    except OSError:
        return False  # it cannot be told now


class Requests:
    """How often a supervisor or an agent was asked to leave.

    By SIGTERM, by SIGUSR1, or by the end of its terminal (unless nohup has it ignore that).
    """

    def __init__(self) -> None:
        """Not at all, yet."""
        self.count = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count signals in the block rather than being ended by them."""

        def note(number: int, frame: object) -> None:
            self.count += 1

        heard = [n for n in _LEAVE if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def stop_on_signals(run: Path, token: str, environ: Mapping[str, str]) -> None:
    """Let this rank take SIGUSR1 as a request to save and leave; below srun SIGTERM as well.

    The launchers end a broken attempt's ranks by SIGTERM, which must not wait for anything; srun
    passes on what Slurm sends before it takes the machines away.
    """

    def ask(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the rank wherever it is
            request_stop(run, token)

    signal.signal(signal.SIGUSR1, ask)
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ and not _launched(environ):
        signal.signal(signal.SIGTERM, ask)


def _launched(environ: Mapping[str, str]) -> bool:
    """Whether the deepspeed launcher or torchrun stands between srun and this rank."""
    return "CROSS_RANK" in environ or "TORCHELASTIC_RUN_ID" in environ


def read_json(path: Path) -> dict[str, Any] | None:
    """A control file's mapping; `None` where there is no whole file, or it cannot be read now."""
    try:
        return _mapping(path.read_bytes())
    except OSError:
        return None


def _mapping(data: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(data)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def write_quickly(path: Path, values: Mapping[str, object]) -> None:
    """Replace a small file: whole for every reader, but not waited for until it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(files.strict_json(values) + "\n", encoding="utf-8")
    partial.replace(path)
