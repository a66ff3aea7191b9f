"""Problems that are noticed in a running attempt."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.config.sections import SupervisionConfig
from pretrain.processes.processes import Member
from pretrain.records import metrics
from pretrain.records.heartbeat import SAVE, STEP, Heartbeat
from pretrain.supervision.decide import CRASH, HANG, Problem
from pretrain.supervision.watch import Follower, StoppedProcesses, Watch

CONFIG = SupervisionConfig(hang_seconds=10, init_seconds=100, save_seconds=50)


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def watch(tmp_path, now):
    return Watch(tmp_path, "t", CONFIG, clock=lambda: now[0])


def record(run, *steps):
    """Write lines of metrics: the number of a step and its seconds."""
    line = dict.fromkeys(metrics.NEEDED[metrics.METRICS], 1)
    lines = [{**line, "step": step, "seconds": seconds} for step, seconds in steps]
    (run / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def test_silence_is_accepted_for_as_long_as_the_stage_may_take(tmp_path, now, watch):
    heart = Heartbeat(tmp_path, "t", seconds=0.0)
    now[0] += 100
    assert watch.silence() == ""
    heart.beat(STEP, 7)
    assert watch.silence() == ""
    now[0] += 100  # no step says yet how long one takes
    assert watch.silence() == ""
    heart.beat(SAVE, 7)
    assert watch.silence() == ""
    now[0] += 50
    assert watch.silence() == ""
    now[0] += 1
    assert watch.silence() == "no sign of life for 50 s in stage save, step 7"
    heart.beat(STEP, 7)
    assert watch.silence() == ""


def test_an_attempt_without_a_heartbeat_has_the_time_of_the_start_up(tmp_path, now, watch):
    Heartbeat(tmp_path, "another attempt").beat(STEP, 3)
    now[0] += 101
    assert "for 100 s in stage init" in watch.silence()


def test_metrics_are_signs_of_life_and_slow_steps_extend_the_limit(tmp_path, now, watch):
    Heartbeat(tmp_path, "t", seconds=0.0).beat(STEP, 7)
    watch.silence()
    now[0] += 9
    lines = record(tmp_path, (7, 4.0))
    assert watch.silence() == ""
    assert list(watch.lines) == lines
    now[0] += 40
    assert watch.silence() == ""
    now[0] += 1
    assert "for 40 s in stage step" in watch.silence()


def test_steps_of_an_earlier_phase_do_not_say_how_long_a_step_may_take(tmp_path, now):
    watch = Watch(tmp_path, "t", CONFIG, clock=lambda: now[0], phases=[0, 7])
    Heartbeat(tmp_path, "t", seconds=0.0).beat(STEP, 9)
    record(tmp_path, *[(6, 1.0)] * 9, (7, 4.0), (8, 4.0))
    assert watch.silence() == ""
    now[0] += 40
    assert watch.silence() == ""
    now[0] += 1
    assert "for 40 s in stage step" in watch.silence()


def test_the_first_step_of_a_phase_may_take_as_long_as_the_start_up(tmp_path, now):
    watch = Watch(tmp_path, "t", CONFIG, clock=lambda: now[0], phases=[0, 7])
    record(tmp_path, *((step, 1.0) for step in range(7)))
    Heartbeat(tmp_path, "t", seconds=0.0).beat(STEP, 7)
    assert watch.silence() == ""
    now[0] += 100
    assert watch.silence() == ""
    now[0] += 1
    assert "for 100 s in stage step, step 7" in watch.silence()


def test_a_supervisor_that_was_stopped_does_not_take_its_pause_for_silence(tmp_path, now, watch):
    heart = Heartbeat(tmp_path, "t", seconds=0.0)
    heart.beat(STEP, 1)
    watch.silence()
    now[0] += 10_000
    heart.beat(STEP, 2)
    assert watch.silence() == ""


def test_a_rank_that_ends_before_the_others_is_noticed_after_the_grace_time(now, watch):
    assert watch.lost_ranks(set()) == ""
    assert watch.lost_ranks({"0", "1", "10"}) == ""
    now[0] += 100
    assert watch.lost_ranks({"0"}) == ""
    now[0] += 2
    assert watch.lost_ranks({"0"}) == ""
    now[0] += 1
    assert "rank 1, 10 ended" in watch.lost_ranks({"0"})
    assert watch.lost_ranks({"0", "1", "10"}) == ""
    assert watch.lost_ranks(set()) == ""
    now[0] += 6
    assert "rank 0, 1, 10 ended" in watch.lost_ranks(set())


def member(pid, rank="1", stopped=True):
    return Member(SimpleNamespace(pid=pid), {} if rank is None else {"RANK": rank}, stopped)


def test_a_process_that_is_stopped_for_too_long_is_named(now):
    stopped = StoppedProcesses(10, clock=lambda: now[0])
    assert stopped.describe([member(7), member(8, "0", stopped=False)]) == ""
    now[0] += 10
    assert stopped.describe([member(7)]) == ""
    now[0] += 1
    assert (
        stopped.describe([member(6, None), member(7)]) == "rank 1 (pid 7) has been stopped for 10 s"
    )
    now[0] += 10
    assert stopped.describe([member(6, None), member(7, stopped=False)]) == ""
    now[0] += 1
    assert (
        stopped.describe([member(6, None), member(7)])
        == "a process (pid 6) has been stopped for 10 s"
    )


def test_a_supervisor_that_was_stopped_with_its_ranks_counts_from_when_it_continues(now):
    stopped = StoppedProcesses(5, clock=lambda: now[0])
    assert stopped.describe([member(7)]) == ""
    now[0] += 10_000
    assert stopped.describe([member(7)]) == ""
    now[0] += 4
    assert stopped.describe([member(7)]) == ""
    now[0] += 1
    assert stopped.describe([member(7, stopped=False)]) == ""


def test_the_new_lines_of_a_growing_file_are_returned_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.new() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert follower.new() == [{"step": 1}, {"step": 2}]
    assert follower.new() == []
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert follower.new() == [{"step": 3}]
    assert Follower(path).new() == []


def test_a_followed_file_is_opened_once_and_again_when_another_one_takes_its_place(
    tmp_path, monkeypatch
):
    path, opens, open_path = tmp_path / "metrics.jsonl", [], Path.open
    follower = Follower(path)
    monkeypatch.setattr(Path, "open", lambda *a, **k: opens.append(1) or open_path(*a, **k))
    for step in range(3):
        with open(path, "a") as file:
            file.write(f'{{"step": {step}}}\n')
        assert follower.new() == [{"step": step}]
    assert len(opens) == 1
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes() + b'{"step": 3}\n')
    copy.replace(path)
    assert [*follower.new(), *follower.new()] == [{"step": 3}]


def test_a_torn_line_that_the_next_writer_cuts_off_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    follower = Follower(path)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert follower.new() == [{"step": 2}]
    with path.open("a") as file:
        file.write('\0\0\n7\n{"step": 3}\n')
    assert follower.new() == [{"step": 3}]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOENT, errno.EAGAIN])
def test_an_unreadable_heartbeat_is_neither_a_sign_of_life_nor_another_stage(
    tmp_path, now, watch, monkeypatch, number
):
    Heartbeat(tmp_path, "t", seconds=0.0).beat(SAVE, 7)
    assert watch.silence() == ""

    def fails(self, *_, **__):
        raise OSError(number, os.strerror(number), str(self))

    with monkeypatch.context() as patch:
        for name in ("read_bytes", "open", "exists"):
            patch.setattr(Path, name, fails)
        now[0] += 50
        assert watch.silence() == ""
        now[0] += 1
        assert watch.silence() == "no sign of life for 50 s in stage save, step 7"
    assert "in stage save, step 7" in watch.silence()  # reading it again is not a sign of life


def test_an_invalid_line_of_metrics_is_skipped(tmp_path, watch):
    (tmp_path / metrics.METRICS).write_text('{"step": 1}\n{"step": 1, "seconds": 2.0}\n')
    assert watch.silence() == ""
    assert not watch.lines


def test_each_problem_is_a_crash_or_a_hang(tmp_path, now, watch):
    assert watch.problem([member(7, "0", stopped=False), member(8)]) is None
    for _ in range(6):
        now[0] += 2
        problem = watch.problem([member(8)])
    assert problem == Problem(CRASH, "rank 0 ended, and the launcher or other ranks still run")
    assert watch.problem([member(7, "0", stopped=False), member(8)]).kind == HANG
    now[0] += 100
    assert watch.problem([member(8)]).reason.startswith("no sign of life for 100 s")
