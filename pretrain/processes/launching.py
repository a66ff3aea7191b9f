"""Helpers for starting a launcher and describing how it ended."""

import signal
import socket
from pathlib import Path


def free_port() -> int:
    """Return a TCP port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_exit(code: int | None) -> str:
    """Describe how a launcher with this exit code ended; `None` if the code is unknown.

    deepspeed exits with 256 - N if signal N killed a rank, shells with 128 + N.
    """
    if code is None:
        return "ended"
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    number = 256 - code if code > 192 else code - 128
    killed = f" (a process was killed by {_signal_name(number)})" if number > 0 else ""
    return f"ended with code {code}{killed}"


def _signal_name(number: int) -> str:
    cause = "; out of memory?" * (number == signal.SIGKILL)
    names = [f" ({item.name}{cause})" for item in signal.Signals if item == number]
    return f"signal {number}{''.join(names)}"


def tail(log: Path, lines: int = 20, start: int = 0) -> str:
    """Return the last lines of what a log has from a byte on; "" if it cannot be read."""
    try:
        text = log.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:]) + "\n"
