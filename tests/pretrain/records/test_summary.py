"""What exports say of the training: the steps before the checkpoint, and nothing later."""

import json

import pytest

from pretrain.config.run import RunConfig
from pretrain.records import metrics
from pretrain.records.summary import summary
from tests.pretrain.histories import History


@pytest.mark.parametrize(
    ("step", "tokens", "attempts", "spikes", "measured"),
    [(0, 0, 0, 0, None), (9, 900, 1, 0, 6), (20, 2000, 2, 1, 12)],
)
def test_it_counts_what_came_before_the_step(step, tokens, attempts, spikes, measured, tmp_path):
    history = History()
    history.begin()
    history.train(9)
    history.commit()
    history.train(5)
    history.spike(onset=10)
    history.roll_back(9)
    history.add("crash", attempt=2, step=9, reason="a launch that did not begin")
    history.begin()
    history.train(20)
    history.write(tmp_path / "run")
    score = {"loss": 5.0, "perplexity": 148.0, "subsets": {}}
    lines = [{"attempt": 1 + 2 * (s > 9), "step": s, **score} for s in (6, 12, 25)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run" / metrics.VALIDATION).write_text(text)
    found = summary(tmp_path / "run", RunConfig(), step)
    assert (found["tokens"], found["attempts"]) == (tokens, attempts)
    assert (found["loss_spikes"], found["rollbacks"]) == (spikes, spikes)
    assert found.get("validation", {}).get("step") == measured
    assert "init_from" not in found
