"""The processes of a run on a machine."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pretrain.processes import processes
from tests.running import wait_until


def process(run, code, node=0):
    """A process of a run, ready when this returns."""
    environment = {**os.environ, processes.RUN_VARIABLE: processes.mark(run, node)}
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(1, flush=True); import time; time.sleep(60)"],
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout.readline() == b"1\n"
    child.stdout.close()
    return child


EXITING = "from tests.running import exit_but_for; print(1, flush=True); exit_but_for(1)"


def pids(run, node=0):
    return {member.pid for member in processes.members(run, node)}


def end(child):
    child.kill()
    child.wait(10)


def test_every_process_of_a_run_is_ended_even_one_that_ignores_sigterm(tmp_path):
    run, another_run = tmp_path / "run", tmp_path / "run-2"
    normal = process(run, "pass")
    ignoring = process(run, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    others = [process(another_run, "pass"), process(run, "pass", node=1)]
    try:
        assert pids(run) == {normal.pid, ignoring.pid}
        processes.end_all(run, 0.6, launcher=ignoring.pid)
        assert ignoring.wait(5) == -signal.SIGKILL
        assert pids(run) == set()
        assert [other.poll() for other in others] == [None, None]
    finally:
        for child in (normal, ignoring, *others):
            end(child)


def test_a_stopped_process_is_continued_so_that_it_handles_sigterm(tmp_path):
    child = process(tmp_path, "pass")
    os.kill(child.pid, signal.SIGSTOP)
    started = time.monotonic()
    processes.end_all(tmp_path, 30.0, launcher=child.pid)
    assert time.monotonic() - started < 20
    assert child.wait(5) == -signal.SIGTERM


def test_a_process_is_alive_until_its_last_thread_has_ended(tmp_path):
    """As one that was killed, while its memory is freed: it keeps its file locks."""
    child = process(tmp_path, EXITING)
    found = psutil.Process(child.pid)
    wait_until(lambda: found.status() == psutil.STATUS_ZOMBIE)
    assert processes.is_alive(found)
    wait_until(lambda: found.num_threads() <= 1)
    assert not processes.is_alive(found)
    child.wait(10)


def test_orphans_are_adopted_and_reaped(tmp_path):
    code = f"""
import os, pathlib, subprocess, sys, time
from pretrain.processes import processes
import psutil
run = pathlib.Path({str(tmp_path)!r})
processes.adopt_orphans()
os.environ[processes.RUN_VARIABLE] = processes.mark(run)
sleep = "import time; time.sleep(60)"
start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {{sleep!r}}])"
subprocess.run([sys.executable, "-c", start], check=True)
(orphan,) = processes.members(run)
assert psutil.Process(orphan.pid).ppid() == os.getpid()
processes.end_all(run, 5)
assert not psutil.pid_exists(orphan.pid), "not reaped"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_processes_that_cannot_be_ended_are_named(tmp_path, monkeypatch):
    child = process(tmp_path, "pass")
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    monkeypatch.setattr(processes, "KILL_SECONDS", 0.1)
    try:
        with pytest.raises(TimeoutError, match=rf"processes {child.pid} .* did not end"):
            processes.end_all(tmp_path, 0.1)
    finally:
        monkeypatch.undo()
        end(child)
    assert not psutil.pid_exists(child.pid)
