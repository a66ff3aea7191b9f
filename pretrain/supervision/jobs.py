"""The launcher process of an attempt on this node, started here or found again.

A new supervisor adopts an attempt that outlived its supervisor, so no step is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import psutil

from pretrain.processes import processes
from pretrain.records import control
from pretrain.records.control import ControlFile
from pretrain.supervision import launch

_IGNORING_STOPS = ("/bin/sh", "-c", 'trap "" USR1; exec "$0" "$@"')
"""Lets SIGUSR1 reach the ranks alone, which set a handler; it would kill their launcher.

Slurm sends it to every process of a job step where it tracks them by their parents
(proctrack/linuxproc). A `preexec_fn` may hang where threads run."""


@dataclasses.dataclass
class Job:
    """A launcher and all processes below it."""

    run: Path
    control_file: ControlFile
    """Of the attempt."""
    node: int
    """Number of this node."""
    process: psutil.Process
    """The launcher."""
    child: subprocess.Popen[bytes] | None = None
    """The same, if this process started it."""

    @property
    def log(self) -> Path:
        """File with the output of the launcher and its ranks."""
        return log_of(self.run, self.control_file, self.node)

    def ended(self) -> bool:
        """Return whether the launcher has ended; its ranks may still run."""
        return not processes.is_alive(self.process)

    def code(self) -> int | None:
        """Return the launcher's exit code; `None` while it runs and for an adopted launcher."""
        return self.child.poll() if self.child else None

    def end(self, grace_seconds: float) -> None:
        """End all its processes; see `processes.end_all`."""
        processes.end_all(self.run, grace_seconds, self.node, self.process.pid)
        if self.child:
            self.child.wait()


def start(run: Path, control_file: ControlFile, node: int) -> Job:
    """Launch an attempt on this node, in a session of its own.

    Args:
        run: folder of the run.
        control_file: describes the attempt.
        node: number of this node.

    Raises:
        ValueError: There are too few GPUs.
    """
    command = launch.command(run, control_file, node)
    log = log_of(run, control_file, node)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
        child = subprocess.Popen(
            [*_IGNORING_STOPS, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=launch.environment(run, control_file, node),
            start_new_session=True,
        )
    return Job(run, control_file, node, psutil.Process(child.pid), child)


def find(run: Path, control_file: ControlFile | None, node: int = 0) -> Job | None:
    """Return the launcher of the attempt that should be running, if it runs on this node.

    Of the processes that lead a session, the launcher is the oldest.
    """
    if control_file is None or control_file.state != control.RUN:
        return None
    leaders: list[psutil.Process] = []
    for member in processes.members(run, node):
        if member.rank is None and control.token_of(member.environment) == control_file.token:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(member.pid) == member.pid:
                    leaders.append(member.process)
    leader = min(leaders, key=psutil.Process.create_time, default=None)
    return Job(run, control_file, node, leader) if leader else None


def log_of(run: Path, control_file: ControlFile, node: int = 0) -> Path:
    """Return the file with the output of an attempt's launcher and ranks on a node."""
    suffix = f"-node-{node:03d}" if node else ""
    return run / "logs" / f"attempt-{control_file.attempt:03d}{suffix}.log"


def write_stdout(text: str) -> None:
    """Write to standard output; do nothing if its terminal is closed or its disk is full."""
    with contextlib.suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()
