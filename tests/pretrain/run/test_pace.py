"""How long ranks work by themselves, and which of them is slow."""

import errno
import os
from pathlib import Path

import pytest

from pretrain.run import pace


def write(run, rank, seconds, token="t", steps=pace._LEAST_STEPS):
    now = [0.0]
    writer = pace.PaceWriter(run, token, rank, clock=lambda: now[0])
    now[0] = pace.WRITE_SECONDS
    return [writer.add(step + 1, seconds) for step in range(steps)]


def test_a_rank_writes_the_median_of_its_last_steps_now_and_then(tmp_path):
    now = [0.0]
    writer = pace.PaceWriter(tmp_path, "t", 3, clock=lambda: now[0])
    for step in range(100):
        assert not writer.add(step, 9.0)
    now[0] = pace.WRITE_SECONDS
    for step in range(100, 100 + pace._STEPS):
        writer.add(step, 1.0)
    assert pace.read(tmp_path, "t")[0].seconds == 9.0
    now[0] = 2 * pace.WRITE_SECONDS
    assert writer.add(200, 50.0)
    (found,) = pace.read(tmp_path, "t")
    assert (found.rank, found.step, found.seconds) == (3, 200, 1.0)
    assert not writer.add(201, 1.0)


def test_too_few_steps_say_nothing(tmp_path):
    assert not any(write(tmp_path, 0, 1.0, steps=pace._LEAST_STEPS - 1))
    assert pace.read(tmp_path, "t") == []


def test_other_attempts_and_torn_files_are_left_out(tmp_path):
    write(tmp_path, 0, 1.0, token="old")
    write(tmp_path, 1, 1.0)
    (tmp_path / pace.FOLDER / "00002.json").write_text('{"token": "t"')
    (tmp_path / pace.FOLDER / "00003.json").write_text('{"token": "t"}')
    assert [found.rank for found in pace.read(tmp_path, "t")] == [1]


def test_a_full_disk_does_not_end_a_rank(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert write(tmp_path, 0, 1.0)[-1]
    assert pace.read(tmp_path, "t") == []


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0], []),
        ([1.0, 1.2], []),
        ([1.0, 1.3], [1]),
        ([1.0, 1.0, 1.0, 1.0], []),
        ([1.0, 1.0, 1.3, 1.0], [2]),
        ([1.0, 1.0, 1.3, 2.0], [3, 2]),
        ([1.0, 0.1, 1.0, 1.0], []),
    ],
)
def test_ranks_are_slow_beside_the_others(tmp_path, seconds, slow):
    for rank, own in enumerate(seconds):
        write(tmp_path, rank, own)
    assert [found.rank for found in pace.slow_ranks(pace.read(tmp_path, "t"))] == slow


def test_a_slow_rank_is_named_with_its_host():
    paces = [pace.Pace("t", rank, f"gpu-{rank}", 9, own) for rank, own in ((0, 0.4), (1, 0.523))]
    (slow,) = pace.slow_ranks(paces)
    assert str(slow) == (
        "rank 1 on gpu-1 is slow: it works 0.523 s in a step by itself, the others 0.4 s; every "
        "step waits for it"
    )


def test_loading_a_batch_is_timed_and_changes_nothing():
    class Slow:
        def seed(self, step):
            return 7 + step

        def epoch(self, step):
            return 0.5

        def micro_batches(self, step, rank, world_size):
            return [step, rank, world_size]

    timed = pace.TimedBatches(Slow())
    assert (timed.seed(1), timed.epoch(1), timed.micro_batches(1, 2, 3)) == (8, 0.5, [1, 2, 3])
    assert timed.take() > 0
    assert timed.take() == 0
    assert pace.own_seconds(1.0, 2.0) == 7.0
