"""Commands whose output nobody reads any more."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.common import console
from tests.running import ROOT

CLOSED = """
import sys
from data_prep.common import console

with console.survive_broken_pipe(), open(sys.argv[1], "w"):
    for stream in (sys.stdout, sys.stderr):
        print("a line", file=stream, flush=True)
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize(  # within the buffer, and far beyond it
    ("opened", "lines"), [(os.pipe, 1), (os.pipe, 20_000), (pty.openpty, 20_000)]
)
def test_what_nobody_reads_any_more_is_dropped(opened, lines, name, monkeypatch):
    ours, theirs = opened()
    with open(theirs, "w") as stream:  # closing it writes what is buffered
        monkeypatch.setattr(sys, name, stream)
        with console.survive_broken_pipe():
            print("first", file=getattr(sys, name), flush=True)
            assert os.read(ours, 100).split() == [b"first"]
            os.close(ours)
            for number in range(lines):
                print("line", number, file=getattr(sys, name))


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_command_whose_output_was_closed_writes_it_into_no_other_file(closed, tmp_path):
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", CLOSED]
    subprocess.run([*shell, tmp_path / "file"], cwd=ROOT, check=True)
    assert (tmp_path / "file").read_bytes() == b""


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
            sys.stdout.writelines(["line\n"] * 20_000)


def test_help_into_a_pipe_without_a_reader_is_quiet():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "finetune.zeroclap", "--help"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
