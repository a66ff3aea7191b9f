"""The errors that ended the ranks of an attempt, and their cause.

The launcher reports an exit code of its own, and its log often ends with another rank's lost
connection. So a rank that fails writes its error to a control file, and the supervisor reads all of
them after the attempt has ended.
"""

import contextlib
import dataclasses
import os
import re
import socket
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from data_prep.common import files
from data_prep.common.wording import few
from pretrain.records import control, versions

_LOST_CONNECTION = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused|aborted)|broken pipe|socket timeout|"
    r"timed out waiting",
    re.IGNORECASE,
)
_MAX_DELAY_SECONDS = 30.0
"""From the first lost connection to the error of the rank that caused it."""
_WRITE_SECONDS = 20.0
"""Time to retry writing an error to a full disk, where the log cannot be written either."""
_MAX_MESSAGE = 2000
"""Characters."""
_MAX_TRACEBACK = 20
"""Lines."""


@dataclasses.dataclass(frozen=True)
class RankError:
    """The error that ended a rank."""

    rank: int
    host: str
    time: float
    """At which its file was written: a server's clock is the same for all hosts."""
    code: int
    """The rank's exit code."""
    message: str
    is_secondary: bool = False
    """Whether it is only a lost connection to another rank."""
    traceback: str = ""
    """Its last lines; "" if the rank refused to start or to continue."""


def report(run: Path, code: int, error: Exception, unexpected: bool = False) -> None:
    """Write the error that ends this rank, unless it has no supervisor or was stopped by it.

    Args:
        run: folder of the run.
        code: exit code of this rank.
        error: the error that ends it.
        unexpected: whether to add the error's type, its place in our code and its traceback.
    """
    token = control.token_of(os.environ)
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    message, last_lines = " ".join(str(error).split())[:_MAX_MESSAGE], ""
    if unexpected:
        message = f"{type(error).__name__}: {message}{_location(error)}"
        lines = "".join(traceback.format_exception(error)).splitlines()
        lines = [line for line in lines if "<frozen importlib" not in line]
        last_lines = "\n".join(lines[-_MAX_TRACEBACK:])
    told = {"rank": rank, "host": socket.gethostname(), "code": code, "message": message}
    told |= {"is_secondary": _is_secondary(error), "traceback": last_lines}
    path = control.folder_of(run) / f"failure-{token}-{rank}.json"
    deadline = time.monotonic() + _WRITE_SECONDS
    with contextlib.suppress(ValueError):  # the caller still raises the error itself
        while token and run.is_dir() and not control.superseded(run, token):
            try:
                files.replace_json(path, told)
            except OSError:
                if time.monotonic() < deadline:
                    time.sleep(_WRITE_SECONDS / 40)
                    continue
            return


def _location(error: Exception) -> str:
    """Return the last line of our own code in an error's traceback."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        with contextlib.suppress(ValueError):
            path = Path(frame.filename).relative_to(versions.ROOT)
            if path.parts[0] in versions.FOLDERS:
                return f" ({path}, line {frame.lineno})"
    return ""


def _is_secondary(error: Exception) -> bool:
    if "EADDRINUSE" in str(error):  # another program uses our port
        return False
    type_names = {kind.__name__ for kind in type(error).__mro__}  # torch is not imported here
    lost = isinstance(error, RuntimeError | OSError) and _LOST_CONNECTION.search(str(error))
    return "DistError" in type_names or bool(lost)


def read_failures(run: Path, token: str) -> list[RankError]:
    """Return the errors of an attempt's ranks, the earliest first."""
    errors = []
    for path in control.folder_of(run).glob(f"failure-{token}-*.json"):
        with contextlib.suppress(TypeError, OSError):
            values = control.read_json(path) or {}
            errors.append(RankError(**{**values, "time": path.stat().st_mtime}))
    return sorted(errors, key=lambda error: error.time)


def cause(errors: Sequence[RankError]) -> RankError | None:
    """Return the first error that is not a lost connection; `None` if there is none.

    Args:
        errors: of one attempt, the earliest first. An error that comes more than 30 seconds after
            the first one cannot be its cause. The clocks of several nodes may differ a little.
    """
    own = [error for error in errors if not error.is_secondary]
    if own and own[0].time - errors[0].time <= _MAX_DELAY_SECONDS:
        return own[0]
    return None


def explain(errors: Sequence[RankError], hosts: Sequence[str] = ()) -> str:
    """Describe the cause of an attempt's end from the ranks' errors; "" if there are none.

    Args:
        errors: of one attempt, the earliest first.
        hosts: host of each rank; empty if even their number is unknown.
    """
    if not errors:
        return ""
    silent = sorted({*range(len(hosts))} - {error.rank for error in errors})
    if silent and not cause(errors):
        names = dict.fromkeys(hosts[rank] for rank in silent)
        on = f" on {few(names)}" if len({*hosts}) > 1 else ""
        return f"rank {few(silent)}{on} ended without a message"
    first = cause(errors) or errors[0]
    same = [error for error in errors if error.message == first.message]
    ranks, where = {error.rank for error in same}, {error.host for error in same}
    return f"rank {few(sorted(ranks))} on {few(sorted(where))}: {first.message}"
