"""Settings: bad ones are refused, with what would be accepted."""

import pytest

from finetune.config import FinetuneConfig
from finetune.protocols import PROTOCOLS
from finetune.tasks import Task


def test_overrides_have_the_type_of_the_setting():
    settings = ["epochs=3", "learning_rate=5e-4", "pooling=mean"]
    config = PROTOCOLS["published"].config(Task("own"), settings)
    assert config == FinetuneConfig(epochs=3, learning_rate=5e-4, pooling="mean")


@pytest.mark.parametrize(
    ("override_text", "message"),
    [
        ("learning_rat=1e-4", "did you mean 'learning_rate'"),
        ("epochs", "write section.key=value"),
        ("dropout=1", "must be below 1"),
        ("epochs=0", "must be above 0"),
        ("pooling=max", "must be one of first or mean"),
        ("max_tokens=5", "must be 6 or above"),
        ("max_train_examples=-1", "must be 0 or above"),
        ("length_window=0", "must be above 0"),
        ("best_epoch_by=f1", "must be one of benchmark or published"),
    ],
)
def test_bad_settings_are_refused(override_text, message):
    with pytest.raises(ValueError, match=message):
        PROTOCOLS["published"].config(Task("own"), [override_text])


def test_the_learning_rate_rises_and_then_falls_to_zero():
    config = FinetuneConfig(learning_rate=1.0, warmup_fraction=0.1)
    rates = [config.rate(step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 101)])
    assert FinetuneConfig(learning_rate=1.0, warmup_fraction=0.0).rate(0, 5) == 1.0


def test_warm_up_and_decay_may_be_counted_in_steps():
    config = FinetuneConfig(learning_rate=1.0, warmup_steps=4, schedule_steps=8)
    rates = [config.rate(step, 10) for step in range(10)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0, 0])


def test_steps_read_every_example_of_every_epoch():
    assert FinetuneConfig(epochs=10, batch_size=16).steps(160) == 100
    assert FinetuneConfig(epochs=3, batch_size=16).steps(17) == 4
