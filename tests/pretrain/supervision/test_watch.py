"""Problems that are noticed in a running attempt."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.config.sections import SupervisionConfig
from pretrain.processes import processes
from pretrain.processes.processes import Member
from pretrain.records import control, metrics
from pretrain.records.control import ControlFile
from pretrain.records.heartbeat import SAVE, STEP, Heartbeat
from pretrain.supervision.watch import StoppedProcesses, Watch
from tests.pretrain.builders import step_record

CONFIG = SupervisionConfig(hang_seconds=10, init_seconds=100)
ATTEMPT = ControlFile("t", 1, control.RUN)


def pass_(now, watch, seconds):
    """Let time pass with a look every second and no news."""
    for _ in range(seconds):
        now[0] += 1
        assert watch.silence() == ""


@pytest.fixture
def watch(tmp_path, now):
    return Watch(tmp_path, ATTEMPT, CONFIG, [0])


def record(run, *steps, attempt=1):
    """Write lines of metrics: the number of a step and its seconds."""
    line = metrics.line_of(step_record(0), attempt)
    lines = [{**line, "step": step, "seconds": seconds} for step, seconds in steps]
    (run / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_silence_is_accepted_for_as_long_as_the_stage_may_take(tmp_path, now, watch):
    heart = Heartbeat(tmp_path, "t")
    pass_(now, watch, 100)
    heart.beat(STEP, 7)
    assert watch.silence() == ""
    pass_(now, watch, 100)  # no step says yet how long one takes
    heart.beat(SAVE, 7)
    assert watch.silence() == ""
    pass_(now, watch, 300)
    now[0] += 1
    assert watch.silence() == "no heartbeat for 300 s in stage save, step 7"
    heart.beat(STEP, 7)
    assert watch.silence() == ""


def test_an_attempt_without_a_heartbeat_has_the_time_of_the_start_up(tmp_path, now, watch):
    Heartbeat(tmp_path, "another attempt").beat(STEP, 3)
    pass_(now, watch, 100)
    now[0] += 1
    assert "for 100 s in stage init" in watch.silence()


@pytest.mark.parametrize(
    ("phases", "lines", "step", "limit"),
    [
        ([0], [(7, 4.0)], 7, 40),
        ([0, 7], [*[(6, 1.0)] * 9, (7, 4.0), (8, 4.0)], 9, 40),
        ([0, 7], [(step, 1.0) for step in range(7)], 7, 100),  # of the start-up
    ],
    ids=["slow steps", "an earlier phase", "the first step of a phase"],
)
def test_the_steps_of_a_phase_say_how_long_its_next_one_may_take(
    tmp_path, now, phases, lines, step, limit
):
    watch = Watch(tmp_path, ATTEMPT, CONFIG, phases)
    record(tmp_path, *lines, attempt=2)
    assert watch.silence() == ""
    assert watch.lines == [], "another attempt's do not count"
    record(tmp_path, *lines)
    Heartbeat(tmp_path, "t").beat(STEP, step)
    assert watch.silence() == ""
    assert [(line["step"], line["seconds"]) for line in watch.lines] == lines
    pass_(now, watch, limit)
    now[0] += 1
    assert f"for {limit} s in stage step, step {step}" in watch.silence()


def test_a_supervisor_that_was_stopped_does_not_take_its_pause_for_silence(tmp_path, now, watch):
    Heartbeat(tmp_path, "t").beat(STEP, 1)
    record(tmp_path, (1, 1.0))
    watch.silence()
    now[0] += 10_000  # its ranks were stopped with it, and have not beaten yet
    assert watch.silence() == ""
    pass_(now, watch, 10)
    now[0] += 1
    assert "for 10 s in stage step, step 1" in watch.silence()


def test_a_process_that_stays_stopped_is_named(monkeypatch):
    def member(pid, rank, stopped=True):
        return Member(SimpleNamespace(pid=pid), {} if rank is None else {"RANK": rank}, stopped)

    found, due = [], [True]
    monkeypatch.setattr(processes, "members", lambda *_: found)
    stopped = StoppedProcesses("run", 0, 30)
    monkeypatch.setattr(stopped._search, "due", lambda seconds: seconds == 10 and due[0])
    found[:] = [member(7, "1"), member(8, "0", stopped=False)]
    assert stopped.describe() == ""
    found[:] = [member(6, None), member(7, "1", stopped=False)]
    assert stopped.describe() == ""
    found[:] = [member(6, None), member(7, "1")]
    assert stopped.describe() == "a process (pid 6) is stopped, as by SIGSTOP"
    found[:] = [member(7, "1")]
    due[:] = [False]
    assert "pid 6" in stopped.describe()
    due[:] = [True]
    assert stopped.describe() == "rank 1 (pid 7) is stopped, as by SIGSTOP"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOENT, errno.EAGAIN])
def test_an_unreadable_heartbeat_is_neither_a_sign_of_life_nor_another_stage(
    tmp_path, now, watch, monkeypatch, number
):
    Heartbeat(tmp_path, "t").beat(SAVE, 7)
    assert watch.silence() == ""

    def fails(self, *_, **__):
        raise OSError(number, os.strerror(number), str(self))

    with monkeypatch.context() as patch:
        for name in ("read_bytes", "open", "exists"):
            patch.setattr(Path, name, fails)
        pass_(now, watch, 300)
        now[0] += 1
        assert watch.silence() == "no heartbeat for 300 s in stage save, step 7"
    assert "in stage save, step 7" in watch.silence()  # reading it again is not a heartbeat
