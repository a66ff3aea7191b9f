"""One run: on several ranks, as a regression, with limits."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from finetune import classifiers
from finetune.config import FinetuneConfig
from finetune.tasks import TASKS
from finetune.train import DevEvaluator, _read_data, train
from tests.finetune.conftest import QUICK, losses_of, make_model, plans, train_on
from tests.pretrain.convert.contents import without_pair_projection


def planned(model, data, task, *overrides):
    (plan,) = plans(model, data, *QUICK, *overrides, names=[task])
    return plan


@pytest.mark.parametrize(
    ("ranks", "batch_size", "deepspeed"),
    [(2, 16, "zero1_fp32"), (3, 16, "zero1_fp32"), (3, 2, "zero3_fp32")],
)
def test_any_number_of_ranks_learns_the_same_as_one(
    ranks, batch_size, deepspeed, run_ranks, tiny_model, easy_glue, tmp_path
):
    """Law 4: also where some have fewer rows, or none. With limits of examples and tokens."""
    limits = [f"epochs={batch_size // 8 + 1}", "max_train_examples=48", "max_tokens=30"]
    settings = [f"batch_size={batch_size}", f"deepspeed={deepspeed}"]
    plan = planned(tiny_model, easy_glue, "RTE", *limits, *settings)
    (tmp_path / "one" / ".model.0123.partial").mkdir(parents=True)  # left by a killed process
    one = train_on(run_ranks, 1, plan, tmp_path / "one")[0]
    several, *nothing = train_on(run_ranks, ranks, plan, tmp_path / "several")
    assert nothing == [{}] * (ranks - 1)
    assert (one["ranks"], several["ranks"]) == (1, ranks)
    left_out = one["too_long"]
    assert min(left_out.values()) > 0
    assert (one["train_examples"], one["dev_examples"]) == (48 - left_out["train"], 50)
    assert one["steps"] == several["steps"] > 2
    assert losses_of(tmp_path / "one") == pytest.approx(losses_of(tmp_path / "several"), rel=1e-5)
    for ours, theirs in zip(one["epochs"], several["epochs"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for name in ("one", "several"):
        assert (tmp_path / name / "model" / "config.json").is_file()
        found = {path.name for path in (tmp_path / name).iterdir()}
        assert found == {"run.json", "metrics.jsonl", "model"}  # nothing else
    ours, theirs = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "several")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_a_regression_learns_and_is_scored_in_published_units(
    run_ranks, segment_model, easy_glue, tmp_path
):
    """One of the model without segments answers in test_finetune_predict."""
    plan = planned(segment_model, easy_glue, "STS-B", "epochs=6")
    (result,) = train_on(run_ranks, 1, plan, tmp_path / "run")
    assert not result["best"]["collapsed"]
    assert result["best"]["pearson"] > 0.8
    correlations = [e["pearson"] + e["spearman"] for e in result["epochs"]]
    assert result["best"] == result["epochs"][correlations.index(max(correlations))]
    assert result["best"]["published_loss"] < 0.5 * result["constant"]["published_loss"]
    for epoch in result["epochs"]:
        assert epoch["published_loss"] == pytest.approx(epoch["loss"] / 0.693147, rel=1e-4)


def test_another_model_or_data_than_those_of_the_plan_are_refused(tiny_model, easy_glue, tmp_path):
    plan = planned(tiny_model, easy_glue, "RTE")
    for changed, message in (
        ({"model_sha256": "c" * 64}, f"{tiny_model}: is not the model that"),
        ({"data_sha256": "c" * 64}, f"{easy_glue}: is not the data that"),
    ):
        with pytest.raises(ValueError, match=message):
            train(dataclasses.replace(plan, **changed), tmp_path)


def test_the_pooler_starts_the_head_and_segments_are_read(segment_model, easy_glue, tmp_path):
    """Of a pair head, and of an ALBERT without one, as on the hub."""
    from pretrain.convert.model_folder import load_model

    hub = make_model(tmp_path / "hub", "albert", pair_head=True)
    without_pair_projection(hub)
    for model, name in ((segment_model, "pair_head.dense"), (hub, "albert.pooler")):
        weights, loaded = load_file(model / "model.safetensors"), load_model(model)
        pooler, projection = weights[f"{name}.weight"], weights.get("pair_head.projection.weight")
        for pooling, start, is_pooler in (
            ("first", "pretrained", True),
            ("mean", "pretrained", False),
            ("first", "random", False),
        ):
            words = [*QUICK, f"pooling={pooling}"]
            (plan,) = plans(model, easy_glue, *words, names=["RTE"], weights=[start])
            head = classifiers.build(loaded, plan).head
            assert torch.equal(head.dense.weight, pooler) == is_pooler
            assert projection is None or not torch.equal(head.projection.weight, projection)
            splits, _ = _read_data(plan, loaded)
            assert all("segment_ids" in each.collate([0]).arrays for each in splits.values())


def test_the_weights_that_are_kept_are_those_of_the_best_epoch(monkeypatch):
    class Examples(list):
        labels = np.array([0, 1, 1, 0])

    def logits_of(model, *_):
        assert not model.training  # else dropout would be scored
        return np.eye(2, dtype=np.float32)[next(answers)]

    # The first of equals is the best; the last model has collapsed.
    answers = iter([[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]])
    monkeypatch.setattr(classifiers, "logits_of", logits_of)
    engine = SimpleNamespace(module=torch.nn.Module(), device="cpu", rank=0, world_size=1)
    engine.weights = lambda: len(scored.epochs)
    batches = SimpleNamespace(ends_epoch=lambda step: True, epoch=int)
    plan = SimpleNamespace(config=FinetuneConfig(), definition=TASKS["RTE"], save_model=True)
    scored = DevEvaluator(engine, batches, plan, {"dev": Examples(range(4))}, print)
    for epoch in range(1, 6):
        scored(epoch)
    assert scored.best["epoch"] == scored.weights == 2
    assert [epoch["collapsed"] for epoch in scored.epochs] == [False] * 4 + [True]


@pytest.mark.slow
def test_the_command_runs_on_three_ranks(tiny_model, easy_glue, tmp_path, capsys):
    from finetune.zeroclap import main

    words = f"glue {tiny_model} --data {easy_glue} --tasks CoLA --world-size 3 --output {tmp_path}"
    assert main([*words.split(), *QUICK, "epochs=3"]) == 0
    (path,) = tmp_path.glob("*/result.json")
    assert json.loads(path.read_text())["ranks"] == 3
    assert "| pretrained | 1 |" in capsys.readouterr().out
