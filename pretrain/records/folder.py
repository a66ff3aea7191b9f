"""A run's folder while it is trained: its lock, its creation, and its machine.

Everything here is done by rank 0, or by the supervisor.
"""

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil

from data_prep import contents
from data_prep.common import files
from data_prep.manifest import CorpusManifest
from pretrain.records import checkpoints, control, ledger, metrics

LOCK = "train.lock"
"""Held by the attempt that trains a run."""
SUPERVISOR_LOCK = "supervisor.lock"
"""Held by the supervisor of a run."""
INITIAL = "initial"
"""Model folder with the weights that the run starts from, where these are not drawn."""
INITIAL_WEIGHTS = f"{INITIAL}/model.safetensors"
_BUSY = {
    LOCK: "is being trained by another attempt",
    SUPERVISOR_LOCK: "is in use by another supervisor",
}
_SIGN_SECONDS = 5.0
"""Interval at which the holder of a lock renews its control file."""
_FRESH_SECONDS = 60.0
SUPERVISED = "supervised.yaml"
"""The merged recipe that the supervisor launches."""
ENVIRONMENT = "environment.json"
"""Versions and machine of the newest attempt."""


def not_a_run(run: Path, missing: str) -> ValueError:
    """Return the error for a path that should be the folder of a run, but lacks a file.

    Runs in the folder itself are named.
    """
    if run.is_file():
        return ValueError(f"{run}: is a file; name the run's folder")
    if not run.exists():
        return ValueError(f"{run}: no such folder")
    runs = ", ".join(str(path.parent) for path in sorted(run.glob(f"*/{ledger.FILE_NAME}")))
    return ValueError(
        f"{run}: has no {missing}, so it is not the folder of a run that has begun"
        + f"; it contains the runs {runs}" * bool(runs)
    )


def lock(run: Path, name: str = LOCK, facts: Mapping[str, object] = {}) -> contextlib.ExitStack:
    """Lock a run against other processes until the result is closed.

    Some file systems lock a file on one machine only. The holder therefore also writes its host,
    process and time into a control file, which a thread renews; a start on another machine waits to
    see whether they change. `holder` reads that file and takes no lock.

    Args:
        run: the run's folder.
        name: LOCK or SUPERVISOR_LOCK.
        facts: what the control file says besides.

    Raises:
        ValueError: another process holds it; the message names it.
        OSError: names the lock; the file system has no locks, or has no room.
    """

    def renew() -> None:
        sign = {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()}
        with contextlib.suppress(OSError):  # tried again
            try:
                files.replace_json(sign_of(run, name), {**sign, **facts})
            except OSError:  # a full disk takes a time
                os.utime(sign_of(run, name))

    def remove() -> None:
        sign = control.read_json(sign_of(run, name)) or {}
        if (sign.get("host"), sign.get("process")) == (socket.gethostname(), os.getpid()):
            sign_of(run, name).unlink(missing_ok=True)

    def unless_refused(action: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):  # the file system is unavailable
            action()

    run.mkdir(parents=True, exist_ok=True)
    file = files.lock(run / name, _BUSY[name])
    with contextlib.ExitStack() as stack:
        stack.callback(unless_refused, file.close)
        check_not_elsewhere(run, name)
        stack.callback(unless_refused, remove)
        renew()
        stack.enter_context(control.repeated(_SIGN_SECONDS, renew))
        held = stack.pop_all()
    atexit.register(held.close)
    return held


def sign_of(run: Path, name: str) -> Path:
    """Return the control file that the holder of a lock renews every few seconds."""
    return control.folder_of(run) / f"{name}.json"


def holder(run: Path, name: str = LOCK) -> str:
    """Return the process that holds a lock of a run, "" if none, without taking the lock.

    The clock of another machine may be wrong by less than a minute.
    """
    sign = control.read_json(sign_of(run, name))
    if sign is None:
        return ""
    if sign["host"] == socket.gethostname():
        try:
            process = psutil.Process(sign["process"])
            is_held = bool(process.cmdline())  # else it is exiting, and closes its files last
            is_held &= process.create_time() < sign["time"]  # else another one with its number
        except psutil.NoSuchProcess:
            is_held = False
    else:
        is_held = abs(time.time() - sign["time"]) < _FRESH_SECONDS
    return f"process {sign['process']} on {sign['host']}" if is_held else ""


def check_not_elsewhere(run: Path, name: str = LOCK) -> None:
    """Check that no process on another machine holds a lock of a run.

    If one may hold it, wait until its control file is due to change.

    Raises:
        ValueError: one does; it is named.
    """
    before, path = control.read_json(sign_of(run, name)), sign_of(run, name)
    if before is None or before["host"] == socket.gethostname():
        return
    # The other clock may be wrong, but not by hours.
    is_old = abs(time.time() - before["time"]) > 3600
    deadline = time.monotonic() + (0.0 if is_old else 4 * _SIGN_SECONDS)
    while time.monotonic() < deadline and path.exists():
        if control.read_json(path) not in (None, before):
            raise ValueError(
                f"{run}: {_BUSY[name]} (process {before['process']} on {before['host']}); wait for "
                "it, end it, or name another folder"
            )
        time.sleep(_SIGN_SECONDS / 10)


def check_not_superseded(records: Sequence[ledger.Record], token: str) -> None:
    """Check that no later attempt has begun.

    The lock keeps attempts apart where it works; on some network file systems it does not.

    Args:
        records: the ledger as it is now.
        token: of this attempt.

    Raises:
        ValueError: a later attempt has begun; the message names it.
    """
    newest = next((r for r in reversed(records) if r["kind"] == "attempt"), None)
    if newest is None:
        raise ValueError(f"{ledger.FILE_NAME}: has lost the records of this attempt, which stops")
    if newest["token"] != token:
        raise ValueError(
            f"attempt {newest['attempt']} (process {newest['pid']} on {newest['host']}) has begun "
            "on this run since; this one stops"
        )


def check_ledger_is_there(
    run: Path, records: Sequence[ledger.Record], copied: Collection[Path] = ()
) -> None:
    """Refuse to begin where a run has saved something that no record of an attempt speaks of.

    Args:
        run: the run's folder.
        records: of its ledger.
        copied: files and folders in it that come from another run.

    Raises:
        ValueError: names what is there, and both ways out.
    """
    if any(record["kind"] == "attempt" for record in records):
        return
    saved = {*run.glob("checkpoints/step-????????"), *run.glob(metrics.METRICS)} - {*copied}
    if saved:
        names = ", ".join(sorted(str(path.relative_to(run)) for path in saved))
        raise ValueError(
            f"{run / ledger.FILE_NAME}: is missing, or has lost its records, but {names} of that "
            "run are there and would be replaced; put the ledger back from a backup to resume the "
            "run, or name a new folder to begin another one"
        )


def check_corpora(manifests: Mapping[str, CorpusManifest]) -> None:
    """Check that the files of a run's corpora are those that their manifests list.

    Files that may have changed since the last check are hashed, which takes about a second a GB;
    of the others, some places are.

    Args:
        manifests: of its corpora, by path.

    Raises:
        ValueError: a file is another one; it is named.
    """
    for path, manifest in manifests.items():
        contents.check(Path(path), manifest)


def damage_of_result(run: Path, state: ledger.RunState) -> str:
    """Verify the last checkpoint of a finished run.

    Returns:
        What is wrong with the checkpoint; "" if it is intact, or the run is not finished.

    Raises:
        OSError: it cannot be read, which proves nothing.
    """
    if not state.finished_steps or not state.checkpoints:
        return ""
    step = state.checkpoints[-1]
    try:
        checkpoints.read_manifest(checkpoints.folder_of(run, step), state.manifests[step])
    except ValueError as error:
        return str(error)
    return ""


def reject_damaged_result(run: Path, state: ledger.RunState) -> str:
    """Return `damage_of_result`; if there is any, record that the run is no longer finished."""
    if reason := damage_of_result(run, state):
        step = state.checkpoints[-1]
        ledger.append(run / ledger.FILE_NAME, "reject", step=step, reason=reason)
    return reason
