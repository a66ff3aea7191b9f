"""Tell others of a rollback, of giving up, and of the end of a run.

The supervisor calls this while no attempt trains, or while the last one exits, so that it may wait.
Whatever fails here is said once and stops nothing. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from data_prep.files import strict_json
from pretrain.run.ledger import Record

WEBHOOK_VARIABLE = "ZEROCLAP_WEBHOOK"
"""Environment variable with the URL that events are posted to. It is a secret, and recipes are
copied into a run's folder and its checkpoints: so it is no setting, and never written or said."""
KINDS = frozenset({"rollback", "corruption", "gave-up", "done", "preempted", "interrupted"})
"""The ledger's records that are told."""
COMMAND_SECONDS, WEBHOOK_SECONDS = 30.0, 10.0


class Notifier:
    """Gives events to a command and to a webhook."""

    def __init__(
        self,
        command: Sequence[str],
        run: Path,
        environ: Mapping[str, str],
        say: Callable[[str], object],
    ) -> None:
        """Check where events go to.

        Args:
            command: `notify.command`.
            run: folder of the run.
            environ: may have the webhook's URL.
            say: receives a message when an event cannot be told for the first time.

        Raises:
            ValueError: there is no such program, or the URL is not one of http or https.
        """
        self._run, self._say, self._failed = run, say, set[str]()
        self._ways: dict[str, Callable[[bytes], None]] = {}
        if command:
            if shutil.which(command[0]) is None:
                raise ValueError(
                    f"notify.command {list(command)}: no program {command[0]}; accepted: a "
                    "program on PATH or its path, and its arguments"
                )
            self._ways["notify.command"] = lambda event: _run(command, event)
        if url := environ.get(WEBHOOK_VARIABLE, ""):
            if not _is_web_address(url):
                raise ValueError(
                    f"{WEBHOOK_VARIABLE} in the environment: accepted: a URL that begins with "
                    "https:// or http:// and names a host (its value is not shown)"
                )
            self._ways[WEBHOOK_VARIABLE] = lambda event: _post(url, event)

    def tell(self, record: Record, sentence: str) -> None:
        """Tell a record of the ledger, if it is one of KINDS.

        The event is a JSON object: `event` (the record's kind), `run` (the folder), `host`, `text`
        (a sentence; the key that Slack and Mattermost show) and `record`.
        """
        if record["kind"] not in KINDS:
            return
        event = {
            "event": record["kind"],
            "run": str(self._run.resolve()),
            "host": socket.gethostname(),
            "text": f"{self._run.name}: {sentence}",
            "record": dict(record),
        }
        for name, way in self._ways.items():
            try:
                way(strict_json(event).encode())
            except Exception as error:
                if name not in self._failed:
                    self._say(f"WARNING: {name} could not be told: {_describe(error)}")
                self._failed.add(name)


def _is_web_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _post(url: str, event: bytes) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "zeroclap"}
    request = urllib.request.Request(url, event, headers)
    with urllib.request.urlopen(request, timeout=WEBHOOK_SECONDS):
        pass


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
    """Describe an error; those of a URL may quote it, so only what is known not to is said."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason) if isinstance(error.reason, OSError) else "no connection"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it was ended after {error.timeout:.0f} s"
    return str(error) if isinstance(error, OSError) else type(error).__name__
