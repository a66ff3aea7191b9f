"""Validation of a model folder."""

import argparse
import math

import pytest
import torch

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from pretrain.data.batches import validation_batches
from pretrain.data.sources import SOURCES
from pretrain.inference.command import add_evaluate_arguments
from pretrain.inference.evaluate import Score, Scores, evaluate_lengths
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig

SETTINGS = MaskedLMConfig()


def model_of(corpus, variant):
    torch.manual_seed(0)
    size = tokenizers.load(corpus).vocab_size
    return LanguageModel(presets.build("tiny", variant, size, {})).eval()


@pytest.fixture
def digest(corpus):
    return tokenizers.load(corpus).digest()


def test_a_model_that_knows_nothing_has_the_vocabulary_s_perplexity(corpus, digest):
    model = model_of(corpus, "baseline")
    with torch.no_grad():
        model.encoder.embeddings.tokens.weight.zero_()
    (result,) = evaluate_lengths(model, digest, corpus, [64], SETTINGS)
    assert result.total.perplexity == pytest.approx(model.config.vocab_size, rel=1e-5)
    assert result.total.loss == pytest.approx(math.log(model.config.vocab_size), rel=1e-6)


@pytest.mark.parametrize("packing", SOURCES)
def test_the_loss_is_that_of_the_validation_batches(packing, corpus, digest):
    model = model_of(corpus, "alibi")
    (result,) = evaluate_lengths(
        model, digest, corpus, [64], SETTINGS, micro_batch_size=3, limit=5, packing=packing
    )
    blocks = SOURCES[packing](Corpus(corpus, "valid"), 64)
    objective = MaskedLM(MaskedLMConfig(), model.config.vocab_size - 1, model.config.vocab_size)
    loss = targets = 0.0
    for batch in validation_batches(blocks, objective, 5, 1, 0, 1):
        tensors = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
        with torch.no_grad():
            loss += float(objective.loss(model, tensors))
        targets += batch.targets[0]
    assert result.blocks == 5
    assert result.total.targets == targets
    assert result.total.loss == pytest.approx(loss / targets, rel=1e-5)


def test_the_command_accepts_every_packing():
    """The command names them itself: its help must not import numpy."""
    parser = argparse.ArgumentParser()
    add_evaluate_arguments(parser)
    (option,) = (action for action in parser._actions if action.dest == "packing")
    assert set(option.choices) == set(SOURCES)


def test_subsets_are_scored_by_name_and_make_up_the_total(corpus, digest):
    model = model_of(corpus, "alibi")
    (result,) = evaluate_lengths(model, digest, corpus, [64], SETTINGS)
    assert list(result.subsets) == ["unknown"]
    assert result.subsets["unknown"] == result.total
    scores = Scores.of([6.0, 2, 3, 0, 0, 0, 8.0, 2, 2], {"masked": 1.0}, ["a", "b", "c"])
    a, c = Score(2.0, math.exp(2.0), 3, 2 / 3), Score(4.0, math.exp(4.0), 2, 1.0)
    assert scores == Scores(Score(14 / 5, math.exp(14 / 5), 5, 4 / 5), {"a": a, "c": c}, {})


def test_the_loss_of_several_terms_is_their_weighted_sum_each_over_its_own_targets():
    sums = [[[6.0, 1, 3], [1.0, 1, 1]], [[4.0, 2, 2], [0, 0, 0]]]
    scores = Scores.of(sums, {"masked": 1.0, "order": 0.5}, ["a", "b"])
    assert scores.terms == {
        "masked": Score(2.0, math.exp(2.0), 5, 3 / 5),
        "order": Score(1.0, math.exp(1.0), 1, 1.0),
    }
    assert scores.total == Score(2.5, math.exp(2.5), 6, 4 / 6)
    assert [scores.subsets[name].loss for name in "ab"] == [2.5, 2.0]


def test_every_length_is_measured_and_alibi_goes_beyond_the_training_length(corpus, digest):
    results = evaluate_lengths(
        model_of(corpus, "zero-clap"), digest, corpus, [48, 64, 150], SETTINGS
    )
    assert [result.length for result in results] == [48, 64, 150]
    assert results[1].blocks > results[2].blocks
    assert all(math.isfinite(result.total.perplexity) for result in results)


def test_learned_positions_beyond_their_table_are_refused(corpus, digest):
    with pytest.raises(ValueError, match="learned positions end at 64"):
        evaluate_lengths(model_of(corpus, "baseline"), digest, corpus, [150], SETTINGS)


def test_a_split_with_nothing_to_predict_is_refused(digest, unpredictable):
    message = (
        f"{unpredictable}: split 'valid' has nothing to predict: its 1 blocks of at most 64 tokens "
        r"hold \d tokens, and none of them is a target .validation: 15 % of the tokens masked"
    )
    with pytest.raises(ValueError, match=message):
        evaluate_lengths(model_of(unpredictable, "alibi"), digest, unpredictable, [64], SETTINGS)


def test_a_command_takes_the_device_that_is_asked_for(corpus, tmp_path, capsys, monkeypatch):
    from pretrain import __main__ as command_line
    from pretrain.engine import distributed
    from pretrain.inference.model_folder import ModelContents, save

    tokenizer = tokenizers.load(corpus)
    model = model_of(corpus, "alibi")
    save(tmp_path / "m", ModelContents(model.config, model.state_dict(), tokenizer, {}))
    flushed = []
    monkeypatch.setattr(distributed, "_flush_denormals", lambda: flushed.append(1))
    for words in (
        ["evaluate", str(tmp_path / "m"), "--data", str(corpus), "--blocks", "1"],
        ["fill-mask", str(tmp_path / "m"), "a <mask>"],
    ):
        assert command_line.main([*words, "--device", "cuda:1"]) == 2
        refused = f"python -m pretrain {words[0]}: error: --device cuda:1: this machine has cpu\n"
        assert capsys.readouterr().err == refused
        for device in ([], ["--device", "cpu"]):
            flushed.clear()
            assert command_line.main([*words, *device]) == 0
            assert flushed
    moved = []
    monkeypatch.setattr(distributed, "choose_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(LanguageModel, "to", lambda self, device: moved.append(device) or self)
    assert command_line.main(words) == 0
    assert moved == [torch.device("meta")]


def test_a_corpus_of_another_vocabulary_is_refused(corpus, digest, other_vocabulary):
    with pytest.raises(ValueError, match="was made with another vocabulary") as caught:
        evaluate_lengths(model_of(corpus, "baseline"), digest, other_vocabulary, [64], SETTINGS)
    assert digest[:12] in str(caught.value)
