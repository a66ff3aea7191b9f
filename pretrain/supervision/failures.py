"""Why the ranks of an attempt ended, in a small control file each, and which error came first.

A launcher reports an exit code of its own, and its log ends with whatever came last: often another
rank's lost connection. So a rank that ends with an error writes the error down, and the supervisor
reads all of them when the attempt has ended. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from pretrain.supervision import control as orders

_OUR_CODE = Path(__file__).parents[2]
_PACKAGES = ("data_prep", "pretrain")
_LOST_CONNECTION = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused|aborted)|broken pipe|socket timeout|"
    r"timed out waiting",
    re.IGNORECASE,
)
_CLOSE_SECONDS = 30.0
"""An error of a rank's own comes at most so long after the first lost connection that it causes."""
_LONGEST = 2000
"""Characters of a message."""
_LINES = 20
"""Last lines of a traceback that are kept."""


@dataclasses.dataclass(frozen=True)
class RankError:
    """The error with which one rank ended."""

    rank: int
    host: str
    time: float
    """Of the rank's wall clock."""
    code: int
    """The rank's exit code."""
    message: str
    follows: bool = False
    """Whether it only says that the connection to another rank was lost."""
    traceback: str = ""
    """Its last lines; "" where a rank refused to start or to go on."""


def report(run: Path, code: int, error: Exception, unexpected: bool = False) -> None:
    """Write down why this rank ends; nothing where nobody supervises it.

    A rank that was told to stop has no error of its own any more.

    Args:
        run: the run's folder.
        code: exit code of this rank.
        error: what ends it.
        unexpected: whether it is worth a traceback; else its message says all.
    """
    token, rank = orders.token_of(os.environ), _rank()
    message = _message(error, unexpected)
    lines = traceback.format_exception(error) if unexpected else []
    last = "".join(lines).splitlines()[-_LINES:]
    own = RankError(
        rank, socket.gethostname(), time.time(), code, message, _follows(error), "\n".join(last)
    )
    with contextlib.suppress(OSError, ValueError):  # the error itself must not be lost
        if token and not orders.superseded(run, token):
            path = orders.folder_of(run) / f"failure-{token}-{rank}.json"
            orders.write_quickly(path, dataclasses.asdict(own))


def _rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def _message(error: Exception, unexpected: bool) -> str:
    words = " ".join(str(error).split())[:_LONGEST]
    if not unexpected:
        return words
    return f"{type(error).__name__}: {words}{_place(error)}"


def _place(error: Exception) -> str:
    """The last line of our own code that an error passed through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        with contextlib.suppress(ValueError):
            path = Path(frame.filename).relative_to(_OUR_CODE)
            if path.parts[0] in _PACKAGES:
                return f" ({path}, line {frame.lineno})"
    return ""


def _follows(error: Exception) -> bool:
    if "EADDRINUSE" in str(error):  # another program has our port
        return False
    kinds = {kind.__name__ for kind in type(error).__mro__}
    lost = isinstance(error, RuntimeError | OSError) and _LOST_CONNECTION.search(str(error))
    return "DistError" in kinds or bool(lost)


def read(run: Path, token: str) -> list[RankError]:
    """What the ranks of an attempt wrote, the earliest first."""
    found = []
    for path in orders.folder_of(run).glob(f"failure-{token}-*.json"):
        values = orders.read_json(path)
        with contextlib.suppress(TypeError):
            found.append(RankError(**(values or {})))
    return sorted(found, key=lambda error: error.time)


def cause(errors: Sequence[RankError]) -> RankError | None:
    """The first error that no other rank's end explains; `None` where every one follows.

    Args:
        errors: of one attempt, the earliest first. The clocks of several machines may differ a
            little.
    """
    own = [error for error in errors if not error.follows]
    if own and own[0].time - errors[0].time <= _CLOSE_SECONDS:
        return own[0]
    return None


def in_words(error: RankError, errors: Sequence[RankError]) -> str:
    """An error with the ranks and hosts that ended with the same message."""
    same = [other for other in errors if other.message == error.message]
    ranks = ", ".join(map(str, sorted({other.rank for other in same})))
    hosts = ", ".join(sorted({other.host for other in same}))
    return f"rank {ranks} on {hosts}: {error.message}"


def explain(errors: Sequence[RankError], world_size: int) -> str:
    """What the ranks' errors say about the end of an attempt; "" where there are none.

    Args:
        errors: of one attempt, the earliest first.
        world_size: how many the attempt had; 0 where that is not known.
    """
    first = cause(errors)
    silent = sorted({*range(world_size)} - {error.rank for error in errors})
    if errors and silent and not first:
        return f"rank {', '.join(map(str, silent))} ended without a message"
    return in_words(first or errors[0], errors) if errors else ""
