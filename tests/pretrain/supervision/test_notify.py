"""Events are told to a true command."""

import json
import sys
import time
from pathlib import Path

import pytest

from pretrain.supervision import notify

RECORD = {"number": 5, "kind": "rollback", "step": 300, "attempt": 1}


def notifier(tmp_path, said, command=()):
    return notify.Notifier(command, tmp_path / "run", said.append)


def test_an_event_is_given_to_the_command(tmp_path):
    """Through no shell: `;` and `$` are letters."""
    script = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    received, said = tmp_path / "event; $HOME", []
    command = [sys.executable, "-c", script, str(received)]
    notifier(tmp_path, said, command).tell(RECORD, "rolled back")
    event = json.loads(received.read_text())
    assert event == {
        "event": "rollback",
        "run": str(tmp_path / "run"),
        "host": event["host"],
        "text": "run: rolled back",
        "record": RECORD,
    }
    assert said == []


def test_records_of_other_kinds_are_not_told(tmp_path):
    said = []
    one = notifier(tmp_path, said, ["false"])
    for kind in ("attempt", "commit", "crash", "suspect"):
        one.tell({**RECORD, "kind": kind}, "")
    assert said == []
    one.tell(RECORD, "")
    assert said


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import sys; print('line'); sys.exit('no mail today')", "exit code 1: no mail today"),
        ("import time; time.sleep(60)", "it was ended after 1 s"),
    ],
)
def test_a_command_that_fails_or_hangs_is_said_once(script, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "COMMAND_SECONDS", 1.0)
    said = []
    one = notifier(tmp_path, said, [sys.executable, "-c", script])
    one.tell(RECORD, "")
    one.tell(RECORD, "")
    assert said == [f"WARNING: notify.command could not be told: {reason}"]


def test_what_a_command_leaves_behind_is_ended(tmp_path):
    """It would be a child of the supervisor, which adopts orphans."""
    left = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {left}"
    notifier(tmp_path, [], ["sh", "-c", script]).tell(RECORD, "")
    pid = int(left.read_text())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and is_running(pid):
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_program_that_does_not_exist_is_refused_before_the_start(tmp_path):
    with pytest.raises(ValueError, match="no program no-such-program"):
        notifier(tmp_path, [], ["no-such-program"])
