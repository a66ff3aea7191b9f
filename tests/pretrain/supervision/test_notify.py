"""Events are told to a true command."""

import json
import subprocess
import sys

import pytest

from pretrain.supervision import notify

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


@pytest.mark.parametrize("command", [["false"], ["sleep", "60"]])
def test_a_command_that_fails_or_hangs_is_an_error(command, tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "COMMAND_SECONDS", 0.2)
    with pytest.raises(subprocess.SubprocessError):
        notify.tell(command, tmp_path, RECORD, "")


def test_a_program_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no program no-such-program"):
        notify.check(["no-such-program"])
