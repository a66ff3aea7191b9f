"""Call the user's program at a rollback, on a full disk, when giving up, and at a run's end."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from data_prep.common.files import strict_json
from pretrain.records.ledger import SPIKE, Record

WAITING = "waiting"
"""The event of a disk without room, which is no record of the ledger."""
KINDS = frozenset({"gave-up", "done", "preempted", WAITING})
"""The events that are sent, beside rollbacks."""
COMMAND_SECONDS = 30.0


def check(command: Sequence[str]) -> None:
    """Raise ValueError if there is no such program."""
    if command and shutil.which(command[0]) is None:
        raise ValueError(f"notify.command {list(command)}: there is no program {command[0]}")


def tell(command: Sequence[str], run: Path, record: Record, sentence: str) -> None:
    """Pass a rollback, or a record of one of KINDS, to a command as JSON on standard input.

    `text` is the key that Slack and Mattermost show.

    Raises:
        OSError: the program cannot be started.
        subprocess.SubprocessError: it fails, or takes too long.
    """
    kind = "rollback" if record.get("why") == SPIKE else record["kind"]
    if command and kind in {*KINDS, "rollback"}:
        event = {"event": kind, "run": str(run.resolve()), "host": socket.gethostname()}
        event |= {"text": f"{run.name}: {sentence}", "record": dict(record)}
        data = strict_json(event).encode() + b"\n"
        # Of a session of its own, to be ended with what it started.
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
            try:
                process.communicate(data, COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
