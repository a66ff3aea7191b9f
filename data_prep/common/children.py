"""The Python processes that a command starts: their environment, and their end.

`python -m` and `python -c` search the working directory first. There a user may have a `torch.py`
or a `pretrain.py` of their own, which would run in place of ours.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

_ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1


class Running(Protocol):
    """Something that a process of ours is at work on."""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process."""


R = TypeVar("R", bound=Running)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of a child process: it finds our packages, and none in its folder.

    Args:
        environ: variables that the child inherits.
    """
    found = {**environ, "PYTHONSAFEPATH": "1"}
    paths = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path]
    if not _is_installed() and str(_ROOT) not in paths:
        paths.insert(0, str(_ROOT))
    return {**found, "PYTHONPATH": os.pathsep.join(paths)} if paths else found


def spawn_context() -> SpawnContext:
    """Return the context that starts the workers of a pool, which inherit this environment."""
    os.environ.update(environment())
    return multiprocessing.get_context("spawn")


@contextmanager
def terminating(kind: type[R]) -> Iterator[dict[int, R]]:
    """Yield an empty dict; processes left in it at the end are terminated, on SIGTERM as well.

    Args:
        kind: of the dict's values.
    """
    running: dict[int, R] = {}
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield running
    finally:
        for each in running.values():
            each.process.terminate()
        for each in running.values():
            each.process.wait()
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def end_with_parent() -> None:
    """Have this process terminated when the one that started it is killed (on Linux only).

    It is the `preexec_fn` of a Popen.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _is_installed() -> bool:
    """Return whether a child finds this very package without this process's working directory."""
    paths = sys.path if sys.flags.safe_path else sys.path[1:]
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    specs = (find("data_prep", paths) for find in finders if find)
    first = next(filter(None, specs), None)
    return first is not None and first.origin == str(_ROOT / "data_prep" / "__init__.py")
