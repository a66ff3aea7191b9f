"""What happened to a run, in sentences."""

import math

import pytest

from pretrain.records import history


def test_every_kind_of_record_that_is_written_has_its_sentence():
    numbers = ("attempt", "step", "ranks", "seed", "onset", "loss", "baseline")
    numbers += ("learning_rate_factor", "learning_rate_steps")
    words = ("host", "run", "channel", "reason", "recipe")
    everything = {**dict.fromkeys(numbers, 3), **dict.fromkeys(words, "why"), "skip": [1, 3]}
    kinds = "attempt suspect healed new-level spike crash reject hang discontinuity preempted"
    for kind in (*kinds.split(), "gave-up", "done"):
        assert history.describe({"kind": kind, **everything}) != kind
    segments = ({"kind": "segment", "why": why} for why in ("spike", "user", "fork"))
    spike, user, fork = (history.describe(segment | everything) for segment in segments)
    assert len({spike, user, fork}) == 3
    assert "with 3 times the learning rate until step 6" in spike


@pytest.mark.parametrize("kind", ["suspect", "healed", "new-level", "spike"])
def test_numbers_that_are_not_finite_or_not_known_are_described(kind):
    record = {"kind": kind, "step": 9, "onset": 7, "channel": "fast", "loss": 6.0, "baseline": 5.0}

    def text(**changes):
        return history.describe({**record, **changes}).partition(": ")[2]

    for missing in (None, math.nan, math.inf):
        assert text(loss=missing) == "fast rise, loss not finite (usually 5), since step 7"
        assert text(baseline=missing) == "fast rise, loss 6, since step 7"
        assert text(channel="validation", loss=missing, baseline=missing) == (
            "validation loss not finite, since step 7"
        )
    assert text(channel="non-finite").startswith("non-finite loss or gradient, loss 6 (usually")
    assert "fp16 (loss-scale), loss 6 (usually 5)" in text(channel="loss-scale")
    assert text(channel="gradient-norm").startswith("raised gradient norm, loss 6 (usually 5)")
    assert text(channel="drift").startswith("rise over thousands of steps, loss 6 (usually 5)")
