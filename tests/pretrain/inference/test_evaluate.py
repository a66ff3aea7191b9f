"""Validation of a model folder."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from pretrain.data.batches import validation_batches
from pretrain.data.sources import SOURCES
from pretrain.data.windows import Windows
from pretrain.inference import evaluate as evaluation
from pretrain.inference.evaluate import (
    Refusal,
    Score,
    Scores,
    evaluate_blocks,
    evaluate_lengths,
    pair_objectives,
    validation_objective,
)
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.base import Vocabulary
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.objectives.sentence_pairs import SentencePairsConfig
from tests.pretrain.memory import LiveBytes


def model_of(corpus, variant):
    torch.manual_seed(0)
    size = tokenizers.load(corpus).vocab_size
    return LanguageModel(presets.build("tiny", variant, size, {})).eval()


def blocks_of(model, folder, limit=0, micro_batch_size=8, packing="complete"):
    """Scores on blocks of 64 tokens."""
    valid = Corpus(folder, "valid")
    source = SOURCES[packing](valid, 64)
    return evaluate_blocks(model, objective_of(model, valid), source, limit, micro_batch_size)


def objective_of(model, valid, settings=None):
    digest = tokenizers.load(valid.folder).digest()
    usual = CausalLMConfig() if model.config.causal else MaskedLMConfig()
    return validation_objective(model, digest, valid, settings or usual)


def lengths_of(model, folder, lengths, limit=0, tokens=512, **reading):
    """Scores by length of the objective that the model is for."""
    valid = Corpus(folder, "valid")
    objective = objective_of(model, valid)
    return list(evaluate_lengths(model, objective, valid, lengths, limit, tokens, **reading))


def test_a_model_that_knows_nothing_has_the_vocabulary_s_perplexity(corpus):
    model = model_of(corpus, "baseline")
    with torch.no_grad():
        model.encoder.embeddings.tokens.weight.zero_()
    for result in (blocks_of(model, corpus), *lengths_of(model, corpus, [20, 64])):
        assert result.total.perplexity == pytest.approx(model.config.vocab_size, rel=1e-5)
        assert result.total.loss == pytest.approx(math.log(model.config.vocab_size), rel=1e-6)


@pytest.mark.parametrize("packing", [name for name, kind in SOURCES.items() if not kind.pairs])
def test_the_loss_is_that_of_the_validation_batches(packing, corpus):
    model = model_of(corpus, "alibi")
    result = blocks_of(model, corpus, 5, 3, packing)
    blocks = SOURCES[packing](Corpus(corpus, "valid"), 64)
    objective = MaskedLM(MaskedLMConfig(), model.config.vocab_size - 1, model.config.vocab_size)
    loss = targets = tokens = 0.0
    for batch in validation_batches(blocks, objective, 5, 1, 0, 1):
        tensors = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
        with torch.no_grad():
            loss += float(objective.loss(model, tensors))
        targets += batch.targets[0]
        documents = batch.arrays["document_ids"].max() if packing != "complete" else 1
        tokens += batch.tokens - documents
    assert result.blocks == min(5, len(blocks))  # Python's help topics differ by its version
    assert result.total.targets == targets
    assert result.total.loss == pytest.approx(loss / targets, rel=1e-5)
    assert result.coverage == tokens / blocks.corpus.lengths.sum()
    assert blocks_of(model, corpus, packing=packing).coverage == blocks.share_of_tokens


def test_subsets_are_scored_by_name_and_make_up_the_total(corpus):
    model = model_of(corpus, "alibi")
    for result in (blocks_of(model, corpus), *lengths_of(model, corpus, [64])):
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
    # A sum of several terms has no perplexity: it is that of the first one, which is of tokens.
    assert scores.total == Score(2.5, math.exp(2.0), 6, 4 / 6)
    assert [scores.subsets[name].loss for name in "ab"] == [2.5, 2.0]


@pytest.mark.parametrize("variant", ["zero-clap", "sinusoidal"])
def test_every_length_scores_the_same_targets_of_the_whole_split(corpus, variant):
    """Beyond the training length too; and all the same where every document is whole."""
    model = model_of(corpus, variant)
    results = lengths_of(model, corpus, [20, 64, 150, 200])
    assert [result.length for result in results] == [20, 64, 150, 200]
    assert len({result.total.targets for result in results}) == 1
    assert all(result.coverage == 1 for result in results)
    windows, documents = [result.blocks for result in results], len(Corpus(corpus, "valid"))
    assert windows[0] > documents
    assert windows[1:] == [documents] * 3
    losses = [result.total.loss for result in results]
    assert losses[1:] == pytest.approx([losses[1]] * 3, rel=1e-6)
    assert losses[2] == losses[3]
    assert losses[0] != pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("variant", ["alibi", "causal-sinusoidal"])
@pytest.mark.parametrize(
    "reading", [{}, {"stride": 16}, {"one_text": True}, {"one_text": True, "stride": 7}], ids=str
)
def test_the_batch_size_does_not_change_scores(corpus, variant, reading):
    model = model_of(corpus, variant)
    one, *others = (
        lengths_of(model, corpus, [40], 9, tokens, **reading)[0] for tokens in (1, 120, 8000)
    )
    for other in others:
        assert other.total.targets == one.total.targets
        assert other.total.loss == pytest.approx(one.total.loss, rel=1e-6)


@pytest.mark.parametrize("one_text", [False, True])
def test_a_sliding_score_is_that_of_single_windows_one_after_another(corpus, one_text):
    """Predictions of the last tokens of each window, without batches, padding or objective."""
    model, valid = model_of(corpus, "causal-rotary"), Corpus(corpus, "valid")
    (found,) = lengths_of(model, corpus, [21], 8, one_text=one_text, stride=6)
    documents = [valid.document(len(valid) * n // 8).astype(np.int64) for n in range(8)]
    losses = []
    for text in [np.concatenate(documents)] if one_text else documents:
        scored = 0
        for first in range(0, len(text), 6):
            window = torch.from_numpy(np.append(0, text[first : first + 20]))
            if first + len(window) - 1 == scored:
                break
            with torch.no_grad():
                logits = model(window[None], None, torch.arange(len(window) - 1))
            loss = cross_entropy(logits, window[1:], reduction="none")
            losses += loss[scored - first :].tolist()
            scored = first + len(window) - 1
    assert found.total.targets == len(losses) == sum(map(len, documents))
    assert found.total.loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_windows_of_one_text_are_the_contiguous_blocks_of_the_training(corpus):
    model = model_of(corpus, "causal-t5-bias")
    (windows,) = lengths_of(model, corpus, [64], one_text=True)
    blocks = blocks_of(model, corpus, packing="contiguous")
    assert windows.blocks == blocks.blocks
    assert windows.total.targets == blocks.total.targets
    assert windows.total.loss == pytest.approx(blocks.total.loss, rel=1e-6)
    (documents,) = lengths_of(model, corpus, [64])
    assert documents.total.targets == windows.total.targets
    assert documents.total != windows.total


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus():
    model = LanguageModel(presets.build("tiny", "causal-alibi", 10, {})).eval()
    objective = CausalLMConfig().build(Vocabulary(10, 10, None))

    def peak(documents):
        split = SimpleNamespace(
            document=lambda index: np.full(30, 5, dtype=np.uint16),
            lengths=np.full(documents, 30, dtype=np.int32),
            tokens=30 * documents,
            subsets=np.zeros(documents, dtype=np.uint8),
            manifest=SimpleNamespace(subsets=["a"]),
        )
        with LiveBytes() as memory:
            windows = Windows(split, range(documents), 16, 8, one_text=True)
            evaluation._window_scores(model, objective, windows, 32, None)
        return memory.peak

    assert peak(240) == peak(120)


def test_a_limit_is_of_documents_and_the_same_at_every_length(corpus):
    model, lengths = model_of(corpus, "alibi"), Corpus(corpus, "valid").lengths
    short, long = lengths_of(model, corpus, [20, 64], limit=5)
    assert long.blocks == 5
    assert short.total.targets == long.total.targets
    chosen = [number * len(lengths) // 5 for number in range(5)]
    assert short.coverage == long.coverage == lengths[chosen].sum() / lengths.sum()


def test_a_length_without_memory_is_refused_and_other_lengths_are_kept(corpus, monkeypatch):
    made = Windows.batches

    def batches(windows, objective, rows):
        if windows.length > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 80 GiB.\nAdvice.")
        yield from made(windows, objective, rows)

    monkeypatch.setattr(Windows, "batches", batches)
    results = lengths_of(model_of(corpus, "alibi"), corpus, [32, 150, 40])
    assert results[1] == Refusal(150, "CUDA out of memory. Tried 80 GiB.")
    assert [result.length for result in results] == [32, 150, 40]


def test_a_split_with_nothing_to_predict_is_refused(unpredictable):
    model = model_of(unpredictable, "alibi")
    nothing = f"{unpredictable}: split 'valid' has nothing to predict: none of the 3 tokens read is"
    with pytest.raises(ValueError, match=nothing):
        lengths_of(model, unpredictable, [3])


def test_a_corpus_of_another_vocabulary_is_refused(corpus, other_vocabulary):
    model, digest = model_of(corpus, "baseline"), tokenizers.load(corpus).digest()
    valid = Corpus(other_vocabulary, "valid")
    with pytest.raises(ValueError, match="was made with another vocabulary") as caught:
        validation_objective(model, digest, valid, MaskedLMConfig())
    assert digest[:12] in str(caught.value)


# --- pairs of segments -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def valid(sentence_corpus):
    return Corpus(sentence_corpus, "valid")


@pytest.fixture(scope="module")
def model(valid):
    torch.manual_seed(0)
    size = tokenizers.load(valid.folder).vocab_size
    return LanguageModel(presets.build("tiny", "albert", size, {"pair_head": True})).eval()


def pairs_of(model, valid, task):
    return objective_of(model, valid, SentencePairsConfig(pair_task=task))


@pytest.mark.parametrize("task", ["sop", "nsp", "none"])
def test_a_head_that_always_answers_the_same_is_right_as_often_as_that_is_so(model, valid, task):
    source, objective = SOURCES["sentence-pairs"](valid, 64), pairs_of(model, valid, task)
    for answer in (0, 1):
        with torch.no_grad():
            model.pair_head.projection.weight.zero_()
            model.pair_head.projection.bias.copy_(torch.tensor([-answer, answer - 1.0]))
        found = evaluate_blocks(model, objective, source, 40, 8).pairs
        assert list(found) == ["masked", "nsp", "sop"]
        for name in ("nsp", "sop"):
            each, score = pair_objectives(objective)[name], found[name]
            batches = validation_batches(source, each, 40, 1, 0, 1)
            right = np.concatenate([batch.arrays["pair_labels"] for batch in batches]) == answer
            assert 0 < score.accuracy < 1
            assert (score.targets, score.accuracy) == (40, right.mean())


def test_the_coverage_leaves_out_what_is_cut_from_long_pairs(model, valid):
    source, objective = SOURCES["sentence-pairs"](valid, 32), pairs_of(model, valid, "sop")
    assert max(source.size(index) for index in range(len(source))) > 32
    ends = len(valid) / valid.lengths.sum()
    found = evaluate_blocks(model, objective, source).coverage
    assert found == pytest.approx(source.share_of_tokens, abs=ends)
    assert found < sum(source.size(index) for index in range(len(source))) / valid.lengths.sum()


def test_documents_of_any_length_have_masked_tokens_alone(model, valid):
    objective = pairs_of(model, valid, "sop")
    short, long = evaluate_lengths(model, objective, valid, [32, 64], 5)
    assert list(short.terms) == ["masked"]
    assert short.total.targets == long.total.targets == long.terms["masked"].targets
