"""Validation of a model folder."""

import argparse
import json
import math

import pytest
import torch

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from pretrain import __main__ as command_line
from pretrain import train
from pretrain.data.batches import validation_batches
from pretrain.data.sources import SOURCES
from pretrain.inference import evaluate as evaluation
from pretrain.inference.command import add_evaluate_arguments
from pretrain.inference.evaluate import (
    Refusal,
    Score,
    Scores,
    evaluate_blocks,
    evaluate_lengths,
    validation_objective,
)
from pretrain.inference.model_folder import ModelContents, save
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.objectives.masked import MaskedLM, MaskedLMConfig
from pretrain.run import metrics


def model_of(corpus, variant):
    torch.manual_seed(0)
    size = tokenizers.load(corpus).vocab_size
    return LanguageModel(presets.build("tiny", variant, size, {})).eval()


def blocks_of(model, folder, limit=0, micro_batch_size=8, packing="complete"):
    """Scores on blocks of 64 tokens."""
    valid = Corpus(folder, "valid")
    source = SOURCES[packing](valid, 64)
    return evaluate_blocks(model, objective_of(model, valid), source, limit, micro_batch_size)


def objective_of(model, valid):
    digest = tokenizers.load(valid.folder).digest()
    return validation_objective(model, digest, valid, MaskedLMConfig())


def lengths_of(model, folder, lengths, limit=0, tokens=512):
    valid = Corpus(folder, "valid")
    return list(evaluate_lengths(model, objective_of(model, valid), valid, lengths, limit, tokens))


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A function of a variant: the folder of a model with random weights."""

    def made(variant):
        path, model = tmp_path_factory.mktemp("models") / "model", model_of(corpus, variant)
        weights = model.state_dict()
        save(path, ModelContents(model.config, weights, tokenizers.load(corpus), {}))
        return str(path)

    return made


def test_a_model_that_knows_nothing_has_the_vocabulary_s_perplexity(corpus):
    model = model_of(corpus, "baseline")
    with torch.no_grad():
        model.encoder.embeddings.tokens.weight.zero_()
    for result in (blocks_of(model, corpus), *lengths_of(model, corpus, [20, 64])):
        assert result.total.perplexity == pytest.approx(model.config.vocab_size, rel=1e-5)
        assert result.total.loss == pytest.approx(math.log(model.config.vocab_size), rel=1e-6)


@pytest.mark.parametrize("packing", SOURCES)
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
    assert result.blocks == 5
    assert result.total.targets == targets
    assert result.total.loss == pytest.approx(loss / targets, rel=1e-5)
    assert result.coverage == tokens / blocks.corpus.lengths.sum()
    assert blocks_of(model, corpus, packing=packing).coverage == blocks.share_of_tokens


def test_the_command_accepts_every_packing():
    """The command names them itself: its help must not import numpy."""
    parser = argparse.ArgumentParser()
    add_evaluate_arguments(parser)
    (option,) = (action for action in parser._actions if action.dest == "packing")
    assert set(option.choices) == set(SOURCES)


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
    assert scores.total == Score(2.5, math.exp(2.5), 6, 4 / 6)
    assert [scores.subsets[name].loss for name in "ab"] == [2.5, 2.0]


@pytest.mark.parametrize("variant", ["zero-clap", "sinusoidal"])
def test_every_length_scores_the_same_targets_of_the_whole_split(corpus, variant):
    """Beyond the training length too; and all the same where every document is whole."""
    model = model_of(corpus, variant)
    results = lengths_of(model, corpus, [20, 64, 150, 301])
    assert [result.length for result in results] == [20, 64, 150, 301]
    assert len({result.total.targets for result in results}) == 1
    assert all(result.coverage == 1 for result in results)
    windows, documents = [result.blocks for result in results], len(Corpus(corpus, "valid"))
    assert windows[0] > documents
    assert windows[1:] == [documents] * 3
    losses = [result.total.loss for result in results]
    assert losses[1:] == pytest.approx([losses[1]] * 3, rel=1e-6)
    assert losses[2] == losses[3]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def test_the_batch_size_does_not_change_the_scores(corpus):
    model = model_of(corpus, "alibi")
    one, *others = (lengths_of(model, corpus, [40], tokens=tokens)[0] for tokens in (1, 120, 8000))
    for other in others:
        assert other.total.targets == one.total.targets
        assert other.total.loss == pytest.approx(one.total.loss, rel=1e-6)


def test_a_limit_is_of_documents_and_the_same_at_every_length(corpus):
    model, lengths = model_of(corpus, "alibi"), Corpus(corpus, "valid").lengths
    short, long = lengths_of(model, corpus, [20, 64], limit=5)
    assert long.blocks == 5
    assert short.total.targets == long.total.targets
    chosen = [number * len(lengths) // 5 for number in range(5)]
    assert short.coverage == long.coverage == lengths[chosen].sum() / lengths.sum()


def test_learned_positions_beyond_their_table_are_refused_and_other_lengths_are_kept(corpus):
    short, refused, whole = lengths_of(model_of(corpus, "baseline"), corpus, [32, 150, 64])
    assert refused == Refusal(150, "the model's learned positions end at 64")
    assert short.total.targets == whole.total.targets > 40


def test_a_length_without_memory_is_refused_and_other_lengths_are_kept(corpus, monkeypatch):
    made = evaluation.window_batches

    def batches(corpus, objective, documents, length, rows):
        if length > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 80 GiB.\nAdvice.")
        yield from made(corpus, objective, documents, length, rows)

    monkeypatch.setattr(evaluation, "window_batches", batches)
    results = lengths_of(model_of(corpus, "alibi"), corpus, [32, 150, 40])
    assert results[1] == Refusal(150, "CUDA out of memory. Tried 80 GiB.")
    assert [result.length for result in results] == [32, 150, 40]


def test_a_split_with_nothing_to_predict_is_refused(unpredictable):
    model = model_of(unpredictable, "alibi")
    nothing = f"{unpredictable}: split 'valid' has nothing to predict: "
    blocks = "its 1 blocks of at most 64 tokens hold .* none of them is a target .validation: 15 %"
    with pytest.raises(ValueError, match=nothing + blocks):
        blocks_of(model, unpredictable)
    with pytest.raises(ValueError, match=f"{nothing}none of the 3 tokens read is a target"):
        lengths_of(model, unpredictable, [64])


# --- the command ---------------------------------------------------------------------------------


def test_lengths_are_a_table_and_what_was_measured_is_kept(folder, corpus, tmp_path, capsys):
    written = tmp_path / "scores.json"
    words = ["evaluate", folder("baseline"), "--data", str(corpus), "--json", str(written)]
    assert command_line.main([*words, "--lengths", "32,150,64", "--blocks", "7"]) == 2
    out, err = capsys.readouterr()
    documents = len(Corpus(corpus, "valid"))
    masks, note, head, *rows = out.splitlines()
    assert masks == "validation: 15 % of the tokens masked, the same for every model"
    assert f"the same targets at every length, of 7 of {documents} documents" in note
    columns = ["length", "windows", "targets", "coverage", "loss", "perplexity", "accuracy"]
    assert head.split() == columns
    short, refused, whole = json.loads(written.read_text())
    reason = "the model's learned positions end at 64"
    assert refused == {"length": 150, "refused": reason}
    assert rows[1].split(maxsplit=1) == ["150", f"refused: {reason}"]
    for row, scores in ((rows[0], short), (rows[2], whole)):
        total = scores["total"]
        assert row.split() == [
            str(scores["length"]),
            str(scores["blocks"]),
            str(total["targets"]),
            f"{scores['coverage']:.1%}",
            f"{total['loss']:.4f}",
            f"{total['perplexity']:.2f}",
            f"{total['accuracy']:.1%}",
        ]
    assert err.endswith(f"error: 1 of 3 lengths were not measured: length 150: {reason}\n")


def test_a_kill_keeps_the_lengths_that_were_done(folder, corpus, tmp_path, monkeypatch, capsys):
    made = evaluation.window_batches

    def batches(corpus, objective, documents, length, rows):
        if length == 40:
            raise KeyboardInterrupt
        return made(corpus, objective, documents, length, rows)

    monkeypatch.setattr(evaluation, "window_batches", batches)
    written = tmp_path / "scores.json"
    words = ["evaluate", folder("alibi"), "--data", str(corpus), "--json", str(written)]
    assert command_line.main([*words, "--lengths", "32,40,20"]) == 130
    assert [scores["length"] for scores in json.loads(written.read_text())] == [32]
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "32", "--packing", "complete"], "--packing: with --lengths every document"),
        (["--blocks", "-1"], "--blocks -1: accepted: 0 (all) or more"),
    ],
)
def test_options_that_mean_nothing_are_refused(folder, corpus, words, message, capsys):
    assert command_line.main(["evaluate", folder("alibi"), "--data", str(corpus), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_score_is_that_of_the_run_to_the_last_digit(
    precision, run_ranks, recipe, tmp_path, capsys
):
    """Blocks, masks, length and micro-batches are the recipe's; a bf16 run rounds its weights."""
    overrides = [f"folder={tmp_path / 'run'}", f"training.deepspeed=zero1_{precision}"]
    overrides += ["training.steps=6", "training.evaluation_blocks=3", "data.sequence_length=48"]
    overrides += ["batch.micro_batch_size=4", "data.packing=chunked", "spike.margin_steps=0"]
    assert run_ranks(1, train.main, [str(recipe.path), *overrides]) == [0]
    model, written = str(tmp_path / "model"), tmp_path / "scores.json"
    assert command_line.main(["export", str(tmp_path / "run"), "--output", model]) == 0
    words = ["--data", str(recipe.load(tmp_path).data.corpus), "--json", str(written)]
    assert command_line.main(["evaluate", model, *words]) == 0
    (found,) = json.loads(written.read_text())
    logged = metrics.read(tmp_path / "run" / metrics.VALIDATION)[-1]
    assert (logged["step"], found["length"], found["blocks"]) == (6, 48, 3)
    assert logged["targets"] == found["total"]["targets"]
    if precision == "fp32":
        assert {name: logged[name] for name in found["total"]} == found["total"]
        assert logged["subsets"] == found["subsets"]
    else:
        assert logged["loss"] == pytest.approx(found["total"]["loss"], rel=2e-3)


def test_a_command_takes_the_device_that_is_asked_for(corpus, folder, capsys, monkeypatch):
    from pretrain.engine import distributed

    model, flushed = folder("alibi"), []
    monkeypatch.setattr(distributed, "_flush_denormals", lambda: flushed.append(1))
    for words in (
        ["evaluate", model, "--data", str(corpus), "--blocks", "1"],
        ["fill-mask", model, "a <mask>"],
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


def test_a_corpus_of_another_vocabulary_is_refused(corpus, other_vocabulary):
    model, digest = model_of(corpus, "baseline"), tokenizers.load(corpus).digest()
    valid = Corpus(other_vocabulary, "valid")
    with pytest.raises(ValueError, match="was made with another vocabulary") as caught:
        validation_objective(model, digest, valid, MaskedLMConfig())
    assert digest[:12] in str(caught.value)
