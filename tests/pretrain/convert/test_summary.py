"""What exports say of the training: the steps before the checkpoint, and nothing later."""

import pytest

from pretrain.convert.export import summary
from pretrain.records.status import view
from tests.pretrain.histories import spiked


@pytest.mark.parametrize(
    ("step", "tokens", "attempts", "spikes", "measured"),
    [(0, 0, 0, 0, None), (9, 900, 1, 0, 6), (10, 1000, 2, 1, 6), (20, 2000, 2, 1, 12)],
)
def test_it_counts_what_came_before_the_step(step, tokens, attempts, spikes, measured, tmp_path):
    history = spiked()
    history.measure(6)
    history.add("crash", attempt=2, step=9, reason="a launch that did not begin")
    history.begin(steps=20)
    history.measure(12)
    history.measure(25)
    history.write(tmp_path / "run")
    found = summary(view(tmp_path / "run"), step)
    assert (found["tokens"], found["attempts"]) == (tokens, attempts)
    assert (found["loss_spikes"], found["rollbacks"]) == (spikes, spikes)
    assert found.get("validation", {}).get("step") == measured
    assert "init_from" not in found
