"""The heartbeat of rank 0, and how long it may be silent."""

import pytest

from pretrain.config.sections import SupervisionConfig
from pretrain.records import heartbeat
from pretrain.records.heartbeat import EVALUATE, INIT, SAVE, STEP, Heartbeat


def test_a_beat_is_written_every_five_seconds_and_at_each_change_of_stage(tmp_path, now):
    heart = Heartbeat(tmp_path, "t")
    assert heartbeat.read_heartbeat(tmp_path, "t") == heartbeat.NO_BEAT
    assert heart.beat(STEP, 1)
    assert not heart.beat(STEP, 2)
    assert heartbeat.read_heartbeat(tmp_path, "t").step == 1
    now[0] += 5.0
    assert heart.beat(STEP, 3)
    assert heart.beat(SAVE, 3)
    assert not heart.beat(SAVE, 3)
    assert heart.beat(STEP, 3)
    assert heartbeat.read_heartbeat(tmp_path, "t") == heartbeat.Beat(STEP, 3, 4)


@pytest.mark.parametrize(
    ("stage", "seconds", "limit"),
    [
        (INIT, [99.0], 500),
        (SAVE, [99.0], 1500),
        (EVALUATE, [99.0], 1500),
        (STEP, [], 500),
        (STEP, [0.1] * 1000, 60),
        (STEP, [8.0] * 1000, 80),
        (STEP, [8.0] * 98 + [1000.0] * 2, 10_000),
        (STEP, [8.0] * 99 + [1000.0], 80),
        (STEP, [11.0], 110),
        (STEP, [11.0, 0.1], 60),
        (STEP, [11.0] + [0.1] * 98, 60),
        (STEP, [500.0, 9.0, 8.0, 7.0], 80),
    ],
)
def test_each_stage_has_a_limit_and_that_of_a_step_follows_the_last_durations(
    stage, seconds, limit
):
    config = SupervisionConfig(init_seconds=500)
    assert heartbeat.silence_limit(stage, seconds, config) == limit
