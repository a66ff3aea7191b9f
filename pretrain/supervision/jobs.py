"""An attempt's launcher on this machine: started, or found again by a supervisor that was killed.

A running attempt that is found is adopted, not ended: nothing of it is lost, and what watches it
(watch.py) does not care who started it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from pretrain.config.run import RunConfig
from pretrain.supervision import control as orders
from pretrain.supervision import launch, processes


class Job:
    """One launcher with everything below it."""

    def __init__(
        self, run: Path, node: int, pid: int, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Take charge of the launcher with process id `pid`; `child` where it is ours."""
        import psutil

        self._run, self._node, self._child = run, node, child
        self.pid, self._process = pid, psutil.Process(pid)

    def ended(self) -> bool:
        """Whether the launcher has ended; its ranks may not have."""
        import psutil

        if self._child:
            return self._child.poll() is not None
        try:
            return self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def code(self) -> int | None:
        """The launcher's exit code; `None` while it runs, and where it was not ours."""
        return self._child.poll() if self._child else None

    def how_ended(self) -> str:
        """How the launcher ended, as far as its exit code tells."""
        return in_words(self.code())

    def members(self) -> list[processes.Member]:
        """The attempt's processes on this machine that are alive."""
        return processes.members(self._run, self._node)

    def end(self, grace_seconds: float) -> None:
        """End all of it, and make sure."""
        processes.end_all(self._run, grace_seconds, self._node, self.pid)
        if self._child:
            self._child.wait()


def start(config: RunConfig, run: Path, order: orders.Order, node: int, log: Path) -> Job:
    """Launch an attempt in a session of its own.

    Args:
        config: the recipe.
        run: its folder.
        order: what is to be launched.
        node: number of this machine.
        log: takes what it prints.

    Raises:
        ValueError: there is no such launcher here, or there are too few GPUs.
    """
    command = launch.command(config, run, order, node)
    environment = launch.environment(os.environ, run, order, node)
    environment |= launch.accelerator(config.supervision, os.environ)
    if config.supervision.hostfile:
        environment |= launch.pass_on_over_ssh(run, order, environment)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        child = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    return Job(run, node, child.pid, child)


def find(run: Path, order: orders.Order | None, node: int = 0) -> Job | None:
    """The launcher of an order that is still to be obeyed, if it runs here.

    It leads a session; so may what it started, but later.
    """
    import psutil

    if order is None or order.state != orders.RUN:
        return None
    leaders: list[tuple[float, int]] = []
    for member in processes.members(run, node):
        if member.rank is not None or orders.token_of(member.environment) != order.token:
            continue
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(member.pid) == member.pid:
                leaders.append((psutil.Process(member.pid).create_time(), member.pid))
    return Job(run, node, min(leaders)[1]) if leaders else None


def in_words(code: int | None) -> str:
    """How a launcher with this exit code ended; `None` where the code is not known.

    deepspeed ends with 256 - N where a rank was killed by signal N, srun and shells with 128 + N.
    """
    if code is None:
        return "ended"
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    number = 256 - code if code > 192 else code - 128
    name = _signal_name(number) if number > 0 else ""
    return f"ended with code {code}" + (f" (a process was killed by {name})" if name else "")


def _signal_name(number: int) -> str:
    """`signal 9 (SIGKILL)`."""
    names = [f" ({item.name})" for item in signal.Signals if item == number]
    return f"signal {number}{''.join(names)}"


def log_of(run: Path, attempt: int, node: int = 0) -> Path:
    """What an attempt's launcher and ranks print on a machine."""
    suffix = f"-node-{node:03d}" if node else ""
    return run / "logs" / f"attempt-{attempt:03d}{suffix}.log"


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log; "" where it cannot be read."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:]) + "\n"
