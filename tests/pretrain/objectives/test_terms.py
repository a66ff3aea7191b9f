"""An objective of several terms, through the engine and through a whole run (law 4)."""

import functools

import pytest
import torch

from data_prep.corpus import Corpus
from pretrain.config.sections import BatchConfig, OptimizerConfig
from pretrain.convert.export import export_checkpoint
from pretrain.convert.model_folder import load_model
from pretrain.data.sources import SOURCES
from pretrain.engine import engine, optimizers
from pretrain.engine.consolidated import consolidated_weights
from pretrain.inference.evaluate import evaluate_blocks, evaluate_lengths, validation_objective
from pretrain.loop.protocols import TermLoss
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.registry import SETTINGS_BY_NAME
from pretrain.records import checkpoints, metrics
from tests.pretrain.builders import batches_of, one_update, save_engine
from tests.pretrain.engine.test_engine import VOCABULARY, RandomBlocks
from tests.pretrain.objectives.toy import Toy, ToyConfig

GLOBAL_BATCH, STEPS = 8, 3
# A large epsilon makes the update smooth in the gradient, so that weights show its error.
SMOOTH = OptimizerConfig(epsilon=1e-3)
RATE = 1e-3


def batches(micro, settings):
    source = RandomBlocks()
    objective, sizes = Toy(settings, VOCABULARY - 1), BatchConfig(GLOBAL_BATCH, micro)
    return batches_of(source, objective, sizes)


def fresh_model():
    torch.manual_seed(1)
    overrides = {"dropout": 0.0, "attention_dropout": 0.0}
    return LanguageModel(presets.build("tiny", "zero-clap", VOCABULARY, overrides))


@functools.cache
def plain(settings):
    """The formula of law 4, on whole global batches in an ordinary PyTorch loop."""
    model = fresh_model()
    adam, data, losses = optimizers.build(model, SMOOTH), batches(GLOBAL_BATCH, settings), []
    for step in range(STEPS):
        (batch,) = data.micro_batches(step, 0, 1)
        sums = data.objective.loss(model, batch.to(torch.device("cpu")))
        weights = data.objective.terms.values()
        terms = zip(weights, sums, batch.targets, strict=True)
        loss = sum(weight * nats / count for weight, nats, count in terms if count)
        adam.zero_grad()
        loss.backward()
        optimizers.set_step(adam.param_groups, SMOOTH, RATE, step)
        adam.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def trained(name, micro, settings, folder):
    """Results of the engine, and the weights it ends with."""
    process, data = engine.start(), batches(micro, settings)
    config = engine.deepspeed_json(name, data.batch, 0.0, process.world_size)
    built = engine.Engine(fresh_model(), SMOOTH, config, process)
    results = []
    for step in range(STEPS):
        mine = data.micro_batches(step, process.rank, process.world_size)
        results.append(one_update(built, mine, data.objective, RATE, step))
    save_engine(built, folder, STEPS)
    return results


def test_the_terms_have_different_shares_of_the_targets_in_different_micro_batches():
    """Else a division by the micro-batch's or the rank's own counts would go unnoticed."""
    data = batches(2, ToyConfig())
    counts = [part.targets for step in range(STEPS) for part in data.micro_batches(step, 0, 1)]
    assert len({parity / tokens for tokens, parity in counts}) > 4
    assert 0 in {parity for _, parity in counts}


@pytest.mark.parametrize(
    ("stage", "ranks", "sizes"), [(0, 1, (8, 2)), (1, 2, (4, 1)), (3, 2, (4, 1))]
)
def test_any_split_of_a_batch_trains_each_term_as_one_plain_pass_over_it(
    stage, ranks, sizes, run_ranks, tmp_path
):
    """Law 4 for several terms; of one term, for more stages and ranks: test_engine."""
    name = f"zero{stage}_fp32"

    def work():
        return [trained(name, size, ToyConfig(), tmp_path / str(size)) for size in sizes]

    reported = run_ranks(ranks, work)
    weights, losses = plain(ToyConfig())
    assert all(results == reported[0] for results in reported)
    for size, results in zip(sizes, reported[0], strict=True):
        assert [result.loss for result in results] == pytest.approx(losses, abs=2e-6)
        for result in results:
            tokens, parity = result.terms["tokens"], result.terms["parity"]
            assert result.loss == tokens.loss + 0.5 * parity.loss
            assert result.targets == tokens.targets + parity.targets
        found = consolidated_weights(checkpoints.folder_of(tmp_path / str(size), STEPS))
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6, msg=name)


def test_a_term_without_targets_in_a_global_batch_contributes_nothing(run_ranks, tmp_path):
    settings = ToyConfig(parity_share=0.0)
    results, _ = run_ranks(2, trained, "zero1_fp32", 2, settings, tmp_path)
    weights, losses = plain(settings)
    assert [result.terms["parity"] for result in results] == [TermLoss(None, 0)] * STEPS
    assert [result.loss for result in results] == [r.terms["tokens"].loss for r in results]
    assert [result.loss for result in results] == pytest.approx(losses, abs=2e-6)
    found = consolidated_weights(checkpoints.folder_of(tmp_path, STEPS))
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6, msg=name)


SHORT = ["training.steps=4", "training.checkpoint_interval=2", "training.evaluation_interval=2"]
SHORT += ["schedule.warmup_steps=1", "spike.margin_steps=0", "spike.confirm_steps=2"]
SHORT += ["spike.patience=1", "objective.name=toy", "objective.parity_weight=0.25"]


def test_a_run_of_an_objective_that_is_one_line_in_the_registry(
    train_ranks, corpus, tmp_path, monkeypatch
):
    """Trained, validated, exported and evaluated."""
    monkeypatch.setitem(SETTINGS_BY_NAME, "toy", ToyConfig)
    run = tmp_path / "run"
    assert [code for code, *_ in train_ranks(run, *SHORT)] == [0, 0]
    lines = metrics.read_metrics(run / metrics.METRICS)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        tokens, parity = line["terms"]["tokens"], line["terms"]["parity"]
        assert line["loss"] == tokens["loss"] + 0.25 * parity["loss"]
        assert line["targets"] == tokens["targets"] + parity["targets"]
        assert parity["targets"] <= 8

    validation = metrics.read_metrics(run / metrics.VALIDATION)[-1]
    assert validation["terms"].keys() == {"tokens", "parity"}
    assert validation["targets"] == sum(t["targets"] for t in validation["terms"].values())
    export_checkpoint(run, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert type(loaded.objective) is ToyConfig
    valid, settings = Corpus(corpus, "valid"), ToyConfig(parity_weight=0.25)
    objective = validation_objective(loaded.model, loaded.tokenizer.digest(), valid, settings)
    found = evaluate_blocks(loaded.model, objective, SOURCES[loaded.data.packing](valid, 64), 6, 2)
    assert validation["loss"] == pytest.approx(found.total.loss, rel=1e-6)
    assert validation["terms"]["parity"]["targets"] == found.terms["parity"].targets
    # Some targets are of a block, so they cannot be the same at every length.
    with pytest.raises(ValueError, match="objective 'toy' cannot draw targets for whole documents"):
        next(evaluate_lengths(loaded.model, objective, valid, [32, 64]))
