"""Tell others of a rollback, of giving up, and of the end of a run.

The supervisor calls this while no attempt trains, or while the last one exits, so that it may wait.
Whatever fails here is said once and stops nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep.common.files import strict_json
from pretrain.records.ledger import Record

KINDS = frozenset({"rollback", "gave-up", "done", "preempted", "interrupted"})
"""The ledger's records that are told."""
COMMAND_SECONDS = 30.0


class Notifier:
    """Gives events to a command."""

    def __init__(
        self,
        command: Sequence[str],
        run: Path,
        say: Callable[[str], object],
    ) -> None:
        """Check where events go to.

        Args:
            command: `notify.command`; empty if nobody is told.
            run: folder of the run.
            say: receives a message when an event cannot be told for the first time.

        Raises:
            ValueError: there is no such program.
        """
        if command and shutil.which(command[0]) is None:
            raise ValueError(
                f"notify.command {list(command)}: there is no program {command[0]}; name one on "
                "PATH, or give its path"
            )
        self._command, self._run, self._say, self._failed = command, run, say, False

    def tell(self, record: Record, sentence: str) -> None:
        """Tell a record of the ledger, if it is one of KINDS.

        The event is a JSON object: `event` (the record's kind), `run` (the folder), `host`, `text`
        (a sentence; the key that Slack and Mattermost show) and `record`.
        """
        if not self._command or record["kind"] not in KINDS:
            return
        event = {
            "event": record["kind"],
            "run": str(self._run.resolve()),
            "host": socket.gethostname(),
            "text": f"{self._run.name}: {sentence}",
            "record": dict(record),
        }
        try:
            _run(self._command, strict_json(event).encode())
        except Exception as error:
            if not self._failed:
                self._say(f"WARNING: notify.command could not be told: {_describe(error)}")
            self._failed = True


def _run(command: Sequence[str], event: bytes) -> None:
    """Run a command with an event on its standard input; end it and what it started in time.

    Raises:
        OSError: it cannot be started, or fails.
        subprocess.TimeoutExpired: it took too long.
    """
    # Files, because a pipe would be kept open by what the command leaves behind.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(event + b"\n")
        given.seek(0)
        child = subprocess.Popen(
            command, stdin=given, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(COMMAND_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if code:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise OSError(f"exit code {code}{': ' if last else ''}{last}")


def _describe(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it was ended after {error.timeout:.0f} s"
    return str(error) if isinstance(error, OSError) else type(error).__name__
