"""Events are told to a true command and to a true web server."""

import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from pretrain.config.run import NotifyConfig, RunConfig, SupervisionConfig
from pretrain.supervision import control, launch, notify

RECORD = {"number": 5, "kind": "rollback", "step": 300, "attempt": 1}
SECRET = "s3cr3t"


@pytest.fixture
def server():
    """A web server that keeps what is posted to it; `server.answer` is its status."""
    posted = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
            time.sleep(self.server.seconds)
            self.send_response(self.server.answer)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        one.answer, one.posted, one.seconds = 200, posted, 0.0
        one.url = f"http://127.0.0.1:{one.server_port}/hooks/{SECRET}?key={SECRET}"
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def notifier(tmp_path, said, command=(), url=""):
    environ = {notify.WEBHOOK_VARIABLE: url} if url else {}
    return notify.Notifier(command, tmp_path / "run", environ, said.append)


def test_an_event_is_given_to_the_command_and_posted_to_the_webhook(server, tmp_path):
    """Through no shell: `;` and `$` are letters."""
    script = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    received, said = tmp_path / "event; $HOME", []
    command = [sys.executable, "-c", script, str(received)]
    notifier(tmp_path, said, command, server.url).tell(RECORD, "rolled back")
    event = json.loads(received.read_text())
    assert event == {
        "event": "rollback",
        "run": str(tmp_path / "run"),
        "host": event["host"],
        "text": "run: rolled back",
        "record": RECORD,
    }
    assert server.posted == [
        (f"/hooks/{SECRET}?key={SECRET}", "application/json", event),
    ]
    assert said == []


def test_records_of_other_kinds_are_not_told(server, tmp_path):
    one = notifier(tmp_path, [], url=server.url)
    for kind in ("attempt", "commit", "crash", "suspect"):
        one.tell({**RECORD, "kind": kind}, "")
    assert server.posted == []


def test_what_a_server_refuses_is_said_once_without_its_address(server, tmp_path):
    server.answer, said = 404, []
    one = notifier(tmp_path, said, url=server.url)
    one.tell(RECORD, "")
    one.tell(RECORD, "")
    assert len(server.posted) == 2
    assert said == ["WARNING: ZEROCLAP_WEBHOOK could not be told: the server answered 404"]


def test_a_server_that_does_not_answer_is_left_in_time(server, tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "WEBHOOK_SECONDS", 0.2)
    server.seconds, said = 5.0, []
    started = time.monotonic()
    notifier(tmp_path, said, url=server.url).tell(RECORD, "")
    assert time.monotonic() - started < 4
    assert "timed out" in said[0]
    assert SECRET not in said[0]


def test_without_a_server_the_cause_is_said_and_not_the_address(server, tmp_path):
    url, said = server.url, []
    server.shutdown()
    server.server_close()
    notifier(tmp_path, said, url=url).tell(RECORD, "")
    (text,) = said
    assert "Connection refused" in text
    assert SECRET not in text


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


@pytest.mark.parametrize(
    ("command", "url", "named"),
    [
        (["no-such-program"], "", "no program no-such-program"),
        ([], f"ftp://host/{SECRET}", "ZEROCLAP_WEBHOOK"),
        ([], SECRET, "ZEROCLAP_WEBHOOK"),
        ([], f"http://host:port/{SECRET}", "ZEROCLAP_WEBHOOK"),
    ],
)
def test_what_can_never_be_told_is_refused_before_the_start(command, url, named, tmp_path):
    with pytest.raises(ValueError, match=named) as caught:
        notifier(tmp_path, [], command, url)
    assert SECRET not in str(caught.value)


def test_ranks_do_not_see_the_webhook(tmp_path, monkeypatch):
    monkeypatch.setenv(notify.WEBHOOK_VARIABLE, f"https://host/{SECRET}")
    order = control.ControlFile("token", 1, control.RUN)
    found = launch.environment(SupervisionConfig(), tmp_path, order)
    assert SECRET not in str(found)
    assert found["PATH"] == os.environ["PATH"]
    assert RunConfig(notify=NotifyConfig(["mail"])).notify.command == ["mail"]
