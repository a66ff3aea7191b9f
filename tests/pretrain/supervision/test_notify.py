"""Events are told to a true command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.supervision import notify
from tests.running import wait_until

RECORD = {"number": 5, "kind": "segment", "why": "spike", "step": 300}


def test_an_event_is_given_to_the_command(tmp_path):
    """Through no shell: `;` and `$` are letters."""
    script = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"
    received = tmp_path / "event; $HOME"
    command = [sys.executable, "-c", script, str(received)]
    for kind, why in (("attempt", ""), ("commit", ""), ("segment", "start"), ("segment", "spike")):
        record = {**RECORD, "kind": kind, "why": why}
        notify.tell(command, tmp_path / "run", record, "rolled back")
    event = json.loads(received.read_text())
    assert event == {
        "event": "rollback",
        "run": str(tmp_path / "run"),
        "host": event["host"],
        "text": "run: rolled back",
        "record": RECORD,
    }


def test_a_command_that_fails_is_an_error(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        notify.tell(["false"], tmp_path, RECORD, "")


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    """As a script that waits for curl: it would keep the terminal or the pipe of `supervise`."""
    monkeypatch.setattr(notify, "COMMAND_SECONDS", 0.5)
    script = 'sleep 600 & echo $! > "$0"; wait'
    with pytest.raises(subprocess.TimeoutExpired):
        notify.tell(["sh", "-c", script, str(tmp_path / "pid")], tmp_path, RECORD, "")
    program = Path("/proc", (tmp_path / "pid").read_text().strip(), "exe")  # a zombie has none
    wait_until(lambda: not program.exists(), seconds=60.0)


def test_a_program_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no program no-such-program"):
        notify.check(["no-such-program"])
