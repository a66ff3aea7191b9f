"""An objective of several terms, through the engine and through a whole run (law 4)."""

import functools

import pytest

from data_prep.corpus import Corpus
from pretrain.convert.export import export_checkpoint
from pretrain.convert.model_folder import load_model
from pretrain.data.sources import SOURCES
from pretrain.inference.evaluate import evaluate_blocks, evaluate_lengths, validation_objective
from pretrain.loop.protocols import TermLoss
from pretrain.objectives.registry import SETTINGS_BY_NAME
from pretrain.records import metrics
from tests.pretrain.builders import lines_of, short
from tests.pretrain.engine.test_engine import VOCABULARY, assert_like_plain, batches, train_and_save
from tests.pretrain.objectives.toy import Toy, ToyConfig

TOY = Toy(ToyConfig(), VOCABULARY - 1)


def test_the_terms_have_different_shares_of_the_targets_in_different_micro_batches():
    """Else a division by the micro-batch's or the rank's own counts would go unnoticed."""
    data = batches(2, objective=TOY)
    counts = [part.targets for step in range(3) for part in data.micro_batches(step, 0, 1)]
    assert len({parity / tokens for tokens, parity in counts}) > 4
    assert 0 in {parity for _, parity in counts}


@pytest.mark.parametrize(
    ("stage", "ranks", "sizes"), [(0, 1, (8, 2)), (1, 2, (4, 1)), (3, 2, (4, 1))]
)
def test_any_split_of_a_batch_trains_each_term_as_one_plain_pass_over_it(
    stage, ranks, sizes, run_ranks, tmp_path
):
    """Law 4 for several terms; of one term, for more stages and ranks: test_engine."""
    for size in sizes:
        run = tmp_path / str(size)
        work = functools.partial(train_and_save, run, f"zero{stage}_fp32", size, objective=TOY)
        results, *others = run_ranks(ranks, work)
        assert all(same == results for same in others)
        assert_like_plain(results, run, objective=TOY)
        for result in results:
            tokens, parity = result.terms["tokens"], result.terms["parity"]
            assert result.loss == tokens.loss + 0.5 * parity.loss
            assert result.targets == tokens.targets + parity.targets


def test_a_term_without_targets_in_a_global_batch_contributes_nothing(run_ranks, tmp_path):
    case = {"objective": Toy(ToyConfig(parity_share=0.0), VOCABULARY - 1)}
    results, _ = run_ranks(2, lambda: train_and_save(tmp_path, "zero1_fp32", **case))
    assert_like_plain(results, tmp_path, **case)
    assert [result.terms["parity"] for result in results] == [TermLoss(None, 0)] * 3
    assert [result.loss for result in results] == [r.terms["tokens"].loss for r in results]


def test_a_run_of_an_objective_that_is_one_line_in_the_registry(
    train_ranks, corpus, tmp_path, monkeypatch
):
    """Trained, validated, exported and evaluated."""
    monkeypatch.setitem(SETTINGS_BY_NAME, "toy", ToyConfig)
    run, settings = tmp_path / "run", ["objective.name=toy", "objective.parity_weight=0.25"]
    assert [code for code, *_ in train_ranks(run, *short(4, 2), *settings)] == [0, 0]
    lines = lines_of(run / metrics.METRICS)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        tokens, parity = line["terms"]["tokens"], line["terms"]["parity"]
        assert line["loss"] == tokens["loss"] + 0.25 * parity["loss"]
        assert line["targets"] == tokens["targets"] + parity["targets"]
        assert parity["targets"] <= 8

    validation = lines_of(run / metrics.VALIDATION)[-1]
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
