"""Python in a process of its own, and waiting for what other processes do."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from data_prep.common import children

ROOT = Path(__file__).parents[1]


def python(*words: object, folder: Path = ROOT, **variables: str) -> str:
    """Run Python with these arguments; return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**children.environment(), **variables},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def exit_but_for(seconds: float) -> None:
    """End this process as the system does after a signal: a thread of it ends last."""
    threading.Timer(seconds, os._exit, [0]).start()
    ctypes.CDLL(None).pthread_exit(None)


def wait_until(
    condition: Callable[[], object], say: Callable[[], object] = str, seconds: float = 300.0
) -> None:
    """Wait for what takes ten seconds on an idle machine; `say` explains that it did not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.05)
