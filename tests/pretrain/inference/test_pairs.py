"""Validation on both tasks of pairs of segments."""

import numpy as np
import pytest
import torch

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from pretrain.data.batches import validation_batches
from pretrain.data.sources import SOURCES
from pretrain.inference.evaluate import (
    evaluate_blocks,
    evaluate_lengths,
    pair_objectives,
    validation_objective,
)
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.sentence_pairs import SentencePairsConfig


@pytest.fixture(scope="module")
def valid(sentence_corpus):
    return Corpus(sentence_corpus, "valid")


@pytest.fixture(scope="module")
def model(valid):
    torch.manual_seed(0)
    size = tokenizers.load(valid.folder).vocab_size
    return LanguageModel(presets.build("tiny", "albert", size, {"pair_head": True})).eval()


def objective_of(model, valid, task):
    digest = tokenizers.load(valid.folder).digest()
    return validation_objective(model, digest, valid, SentencePairsConfig(pair_task=task))


def labels(source, objective, limit):
    batches = validation_batches(source, objective, limit, 1, 0, 1)
    return np.concatenate([batch.arrays["pair_labels"] for batch in batches])


@pytest.mark.parametrize("task", ["sop", "nsp", "none"])
def test_a_head_that_always_answers_the_same_is_right_as_often_as_that_is_so(model, valid, task):
    source, objective = SOURCES["sentence-pairs"](valid, 64), objective_of(model, valid, task)
    for answer in (0, 1):
        with torch.no_grad():
            model.pair_head.projection.weight.zero_()
            model.pair_head.projection.bias.copy_(torch.tensor([-answer, answer - 1.0]))
        found = evaluate_blocks(model, objective, source, 40, 8).pairs
        assert list(found) == ["masked", "nsp", "sop"]
        for name in ("nsp", "sop"):
            each, score = pair_objectives(objective)[name], found[name]
            right = labels(source, each, 40) == answer
            assert 0 < score.accuracy < 1
            assert (score.targets, score.accuracy) == (40, right.mean())


@pytest.mark.parametrize("task", ["sop", "nsp", "none"])
def test_the_own_task_is_scored_as_in_the_run_and_masked_tokens_alike_for_every_task(
    model, valid, task
):
    source, objective = SOURCES["sentence-pairs"](valid, 64), objective_of(model, valid, task)
    found = evaluate_blocks(model, objective, source, 10, 4)
    in_order = evaluate_blocks(model, objective_of(model, valid, "none"), source, 10, 4).total
    assert found.pairs["masked"] == in_order
    assert task == "none" or found.pairs[task] == found.terms[task]


def test_the_coverage_leaves_out_what_is_cut_from_long_pairs(model, valid):
    source, objective = SOURCES["sentence-pairs"](valid, 32), objective_of(model, valid, "sop")
    assert max(source.size(index) for index in range(len(source))) > 32
    ends = len(valid) / valid.lengths.sum()
    found = evaluate_blocks(model, objective, source).coverage
    assert found == pytest.approx(source.share_of_tokens, abs=ends)
    assert found < sum(source.size(index) for index in range(len(source))) / valid.lengths.sum()


def test_documents_of_any_length_have_masked_tokens_alone(model, valid):
    objective = objective_of(model, valid, "sop")
    short, long = evaluate_lengths(model, objective, valid, [32, 64], 5)
    assert list(short.terms) == ["masked"]
    assert short.total.targets == long.total.targets == long.terms["masked"].targets
