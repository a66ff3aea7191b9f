"""Commands whose output nobody reads any more."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.common import console

ROOT = Path(__file__).parents[3]
COMMAND = """
import sys
from data_prep.common import console

@console.survive_broken_pipe()
def main():
    for stream in (sys.stdout, sys.stderr):
        stream.write("first\\n")
        stream.flush()
    sys.stdin.readline()
    for number in range({lines}):
        print("line", number)
        print("line", number, file=sys.stderr)
    open({done!r}, "w").close()
    return 76

sys.exit(main())
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a command: it prints, waits, prints more, and exits with 76."""
    children = []

    def begin(lines, **streams):
        code = COMMAND.format(lines=lines, done=str(tmp_path / "done"))
        child = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, **streams
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()
        child.stdin.close()


def go_on(child):
    child.stdin.write(b"\n")
    child.stdin.flush()
    return child.wait(30)


@pytest.mark.parametrize(  # within the buffer, and far beyond it
    ("opened", "lines"), [(os.pipe, 1), (os.pipe, 20_000), (pty.openpty, 20_000)]
)
def test_a_command_whose_reader_is_gone_ends_its_work_with_its_own_code(
    start, opened, lines, tmp_path
):
    ours, theirs = opened()
    child = start(lines, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.read(ours, 100)
    os.close(ours)
    assert go_on(child) == 76
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_command_whose_output_was_closed_writes_it_into_no_other_file(closed, tmp_path):
    code = COMMAND.format(lines=3, done=str(tmp_path / "done"))
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    done = subprocess.run(
        [*shell, sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 76
    assert (tmp_path / "done").read_bytes() == b""


def test_a_reader_gets_all_output(start):
    child = start(3, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with child.stdout as file:
        assert go_on(child) == 76
        assert file.read() == b"first\nline 0\nline 1\nline 2\n"


@pytest.mark.parametrize(
    ("encoding", "written"), [("ascii", b"na\\xefve"), ("utf-8", b"na\xc3\xafve")]
)
def test_characters_that_an_encoding_lacks_are_written_as_escapes(monkeypatch, encoding, written):
    """Regression test: with PYTHONIOENCODING=ascii `predict` answered, and printed an error."""
    for name in ("stdout", "stderr"):
        file = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(file, encoding))
        with console.survive_broken_pipe():
            print("na\xefve \ud800", file=getattr(sys, name))
        assert file.getvalue() == written + b" \\ud800\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_is_not_the_result_of_a_command_may_be_lost(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with console.survive_broken_pipe(), console.survive_broken_pipe(False):
            print("line\n" * 20_000)


@pytest.mark.parametrize("package", ["data_prep", "pretrain", "finetune"])
def test_help_into_a_pipe_without_a_reader_is_quiet(package):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", package, "--help"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
