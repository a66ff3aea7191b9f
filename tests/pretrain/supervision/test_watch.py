"""What is seen of a running attempt, and what is complained of."""

import errno
import json
import os
from pathlib import Path

import pytest

from pretrain.config.run import SupervisionConfig
from pretrain.run import metrics
from pretrain.supervision.heartbeat import SAVE, STEP, Heartbeat
from pretrain.supervision.processes import Member
from pretrain.supervision.watch import Follower, StoppedProcesses, Watch

CONFIG = SupervisionConfig(hang_seconds=10, init_seconds=100, save_seconds=50, grace_seconds=5)


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def watch(tmp_path, now):
    return Watch(tmp_path, "t", CONFIG, clock=lambda: now[0])


def test_silence_is_borne_for_as_long_as_the_phase_may_take(tmp_path, now, watch):
    heart = Heartbeat(tmp_path, "t", seconds=0.0)
    now[0] += 100
    assert watch.look() == ""
    heart.beat(STEP, 7)
    assert watch.look() == ""
    now[0] += 10
    assert watch.look() == ""
    heart.beat(SAVE, 7)
    assert watch.look() == ""
    now[0] += 50
    assert watch.look() == ""
    now[0] += 1
    assert watch.look() == "nothing was heard of it for 50 s in phase save, step 7"
    heart.beat(STEP, 7)
    assert watch.look() == ""


def test_an_attempt_that_never_speaks_has_the_time_of_its_setting_up(tmp_path, now, watch):
    Heartbeat(tmp_path, "of another attempt").beat(STEP, 3)
    now[0] += 101
    assert "for 100 s in phase init" in watch.look()


def test_metrics_are_signs_of_life_and_slow_steps_are_given_time(tmp_path, now, watch):
    Heartbeat(tmp_path, "t", seconds=0.0).beat(STEP, 7)
    watch.look()
    now[0] += 9
    line = {**dict.fromkeys(metrics.NEEDED[metrics.METRICS], 1), "step": 7, "seconds": 4.0}
    (tmp_path / metrics.METRICS).write_text(json.dumps(line) + "\n")
    assert watch.look() == ""
    assert list(watch.lines) == [line]
    now[0] += 40
    assert watch.look() == ""
    now[0] += 1
    assert "for 40 s in phase step" in watch.look()


def test_a_supervisor_that_was_stopped_itself_does_not_take_that_for_silence(tmp_path, now, watch):
    heart = Heartbeat(tmp_path, "t", seconds=0.0)
    heart.beat(STEP, 1)
    watch.look()
    now[0] += 10_000
    heart.beat(STEP, 2)
    assert watch.look() == ""


def test_a_rank_that_goes_before_the_others_is_noticed_after_some_seconds(now, watch):
    assert watch.count(set()) == ""
    assert watch.count({"0", "1", "10"}) == ""
    now[0] += 100
    assert watch.count({"0"}) == ""
    now[0] += 5
    assert watch.count({"0"}) == ""
    now[0] += 1
    assert "rank 1, 10 ended" in watch.count({"0"})
    assert watch.count({"0", "1", "10"}) == ""
    assert watch.count(set()) == ""
    now[0] += 6
    assert "rank 0, 1, 10 ended" in watch.count(set())


def test_below_srun_ranks_are_not_counted(tmp_path, now):
    watch = Watch(tmp_path, "t", SupervisionConfig(launcher="srun"), clock=lambda: now[0])
    assert watch.count({"1"}) == ""
    now[0] += 1000
    assert watch.count(set()) == ""
    now[0] += 1000
    assert watch.count(set()) == ""


def member(pid, rank="1", stopped=True):
    return Member(pid, {} if rank is None else {"RANK": rank}, stopped)


def test_a_process_that_is_stopped_for_too_long_is_named(now):
    stopped = StoppedProcesses(10, clock=lambda: now[0])
    assert stopped.look([member(7), member(8, "0", stopped=False)]) == ""
    now[0] += 10
    assert stopped.look([member(7)]) == ""
    now[0] += 1
    assert stopped.look([member(6, None), member(7)]) == "rank 1 (pid 7) has been stopped for 10 s"
    now[0] += 10
    assert stopped.look([member(6, None), member(7, stopped=False)]) == ""
    now[0] += 1
    assert (
        stopped.look([member(6, None), member(7)]) == "a process (pid 6) has been stopped for 10 s"
    )


def test_a_watcher_that_was_stopped_with_its_ranks_counts_from_when_it_goes_on(now):
    stopped = StoppedProcesses(5, clock=lambda: now[0])
    assert stopped.look([member(7)]) == ""
    now[0] += 10_000
    assert stopped.look([member(7)]) == ""
    now[0] += 4
    assert stopped.look([member(7)]) == ""
    now[0] += 1
    assert stopped.look([member(7, stopped=False)]) == ""


def test_the_new_lines_of_a_growing_file_are_followed(tmp_path):
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


def test_a_torn_line_that_the_next_attempt_cuts_off_misleads_nobody(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    follower = Follower(path)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert follower.new() == [{"step": 2}]
    with path.open("a") as file:
        file.write('\0\0\n7\n{"step": 3}\n')
    assert follower.new() == [{"step": 3}]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOENT, errno.EAGAIN])
def test_a_heartbeat_that_cannot_be_read_is_neither_a_sign_of_life_nor_another_phase(
    tmp_path, now, watch, monkeypatch, number
):
    Heartbeat(tmp_path, "t", seconds=0.0).beat(STEP, 7)
    assert watch.look() == ""

    def fails(self, *_, **__):
        raise OSError(number, os.strerror(number), str(self))

    with monkeypatch.context() as patch:
        for name in ("read_bytes", "open", "exists"):
            patch.setattr(Path, name, fails)
        now[0] += 10
        assert watch.look() == ""
        now[0] += 1
        assert watch.look() == "nothing was heard of it for 10 s in phase step, step 7"
    assert "in phase step, step 7" in watch.look()  # nor is being read again


def test_a_spoiled_line_of_metrics_is_no_newest_line(tmp_path, watch):
    (tmp_path / metrics.METRICS).write_text('{"step": 1}\n{"step": 1, "seconds": 2.0}\n')
    assert watch.look() == ""
    assert not watch.lines
