"""Settings and plans: bad ones are refused, with what would be accepted."""

import dataclasses
import json

import pytest

from finetune.config import FinetuneConfig, override
from finetune.plan import PLAN, RunPlan, read_plan

PLANNED = RunPlan(
    task="CoLA",
    weights="random",
    seed=3,
    model="model",
    data="glue",
    model_sha256="a" * 64,
    data_sha256="b" * 64,
    config=FinetuneConfig(epochs=2),
)


def test_overrides_have_the_type_of_the_setting():
    config = override(FinetuneConfig(), ["epochs=3", "learning_rate=5e-4", "pooling=mean"])
    assert config == FinetuneConfig(epochs=3, learning_rate=5e-4, pooling="mean")


@pytest.mark.parametrize(
    ("override_text", "message"),
    [
        ("learning_rat=1e-4", "did you mean 'learning_rate'"),
        ("epochs", "write section.key=value"),
        ("dropout=1", r"must be in \[0, 1\)"),
        ("epochs=0", "must be above 0"),
        ("pooling=max", "must be one of first, mean"),
        ("max_tokens=5", "must be at least 6"),
        ("max_train_examples=-1", "must be 0 or above"),
        ("length_window=0", "must be above 0"),
        ("best_epoch_by=f1", "must be one of benchmark, published, last"),
    ],
)
def test_bad_settings_are_refused(override_text, message):
    with pytest.raises(ValueError, match=message):
        override(FinetuneConfig(), [override_text])


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


def test_a_plan_is_read_as_it_was_written(tmp_path):
    PLANNED.write(tmp_path / PLANNED.name)
    assert read_plan(tmp_path / "CoLA-random-seed3") == PLANNED


def test_a_plan_of_another_version_is_refused(tmp_path):
    PLANNED.write(tmp_path)
    values = json.loads((tmp_path / PLAN).read_text())
    for changed, name in [
        ({**values, "judge": "strict"}, "'judge'"),
        ({**values, "config": {**values["config"], "freeze": 3}}, "'config.freeze'"),
    ]:
        (tmp_path / PLAN).write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=rf"run\.json: .*unknown key {name}"):
            read_plan(tmp_path)


def test_differences_name_what_makes_scores_incomparable():
    moved = dataclasses.replace(PLANNED, seed=4, weights="pretrained", model="x", data="y")
    assert PLANNED.differences(moved) == []
    other = dataclasses.replace(PLANNED, model_sha256="c" * 64, config=FinetuneConfig(epochs=5))
    assert PLANNED.differences(other) == [f"model: {'a' * 12}, now {'c' * 12}", "epochs: 2, now 5"]


def test_a_folder_without_a_plan_or_with_an_invalid_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not the folder of a run"):
        read_plan(tmp_path)
    (tmp_path / PLAN).write_text('{"task": "CoLA"}')
    with pytest.raises(ValueError, match=r"run\.json: not a plan that .* missing"):
        read_plan(tmp_path)
