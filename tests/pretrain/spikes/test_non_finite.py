"""Updates that are not finite: when a run is suspected and rolled back, live and replayed."""

import math

import pytest

from data_prep.common.exit_codes import EXIT_SPIKE
from pretrain.config.sections import SpikeConfig
from pretrain.records import metrics
from pretrain.spikes.detector import SpikeDetector
from pretrain.spikes.live import SpikeWatch
from pretrain.spikes.replay import read_curve
from tests.pretrain.builders import step_record

STEPS, ONSET = 1_000, 600
NAN = {"loss": math.nan, "gradient_norm": None}
SKIPPED = {**NAN, "skipped": True}
OVERFLOW = {"gradient_norm": None, "skipped": True, "loss_scale": 8.0}


def at_smallest_scale(after):
    """A loss scale that falls from 8 and cannot fall below 1."""
    return {**OVERFLOW, "loss_scale": max(1.0, 8.0 / 2**after), "scale_exhausted": after >= 3}


@pytest.mark.parametrize(
    ("measured", "suspected", "confirmed"),
    [
        pytest.param(lambda after: SKIPPED if after == 0 else {}, 0, None, id="one NaN, skipped"),
        pytest.param(lambda after: NAN if after == 0 else {}, 0, 0, id="one NaN, applied"),
        pytest.param(lambda after: SKIPPED, 0, 5, id="NaN for ever, skipped"),
        pytest.param(lambda after: NAN, 0, 0, id="NaN for ever, applied"),
        pytest.param(lambda after: {} if after % 3 else SKIPPED, 0, 75, id="every third, skipped"),
        pytest.param(lambda after: {} if after % 12 else SKIPPED, 0, None, id="every twelfth"),
        pytest.param(lambda after: SKIPPED if after % 40 < 3 else {}, 0, None, id="3 of 40"),
        pytest.param(lambda after: SKIPPED if after % 40 < 5 else {}, 0, 200, id="5 of 40"),
        pytest.param(lambda after: OVERFLOW if after == 0 else {}, None, None, id="one overflow"),
        pytest.param(lambda after: {} if after % 3 else OVERFLOW, None, None, id="overflows"),
        pytest.param(lambda after: OVERFLOW, 5, 55, id="overflows for ever"),
        pytest.param(at_smallest_scale, 3, 3, id="at the smallest loss scale"),
    ],
)
def test_updates_that_are_not_finite_are_answered_in_time_live_as_replayed(
    measured, suspected, confirmed, tmp_path
):
    """`measured(after)`: fields of the step so many steps after the onset, where they differ.

    `suspected` and `confirmed`: most steps from there to the first event, and to the spike.
    """
    live = []
    watch = SpikeWatch(SpikeDetector(SpikeConfig()), [], live.append)
    writer = metrics.MetricsWriter(tmp_path, 1)
    for step in range(STEPS):
        changes = measured(step - ONSET) if step >= ONSET else {}
        record = step_record(step, **{"loss": 3.0 + 0.05 * math.sin(step * step), **changes})
        writer(record)
        if watch(record) == EXIT_SPIKE:
            break
    detector = SpikeDetector(SpikeConfig())
    replayed = [event for seen in read_curve(tmp_path) for event in detector.update(seen)]
    assert repr(live) == repr(replayed)  # NaN is not equal to itself
    spikes = [event for event in live if event.kind == "spike"]
    for events, most in ((live, suspected), (spikes, confirmed)):
        assert bool(events) == (most is not None)
        assert most is None or events[0].step <= ONSET + most
    assert all(spike.onset == ONSET for spike in spikes)
