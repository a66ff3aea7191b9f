"""The command `evaluate`: options, tables and files."""

import argparse
import json
import os
import re

import pytest
import torch

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from finetune import zeroclap as command_line
from pretrain.convert.writing import save_model
from pretrain.data.sources import SOURCES
from pretrain.data.windows import Windows
from pretrain.inference import evaluate, evaluation
from pretrain.inference.command import add_evaluate_arguments
from pretrain.model.language_model import LanguageModel
from pretrain.records import metrics
from pretrain.train import __main__ as train
from tests.pretrain.builders import lines_of
from tests.pretrain.convert.contents import random_contents


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(corpus, variant, packing, objective)`: a model that was trained on blocks of 64."""

    def made(corpus, variant, packing, objective, **overrides):
        recipe = {"data": {"sequence_length": 64, "packing": packing}, "objective": objective}
        path = tmp_path_factory.mktemp("models") / variant
        provenance = {"recipe": recipe}
        vocabulary = tokenizers.load(corpus)
        save_model(path, random_contents(variant, vocabulary, provenance=provenance, **overrides))
        return str(path)

    return made


@pytest.fixture(scope="module")
def folder(saved, corpus):
    def made(variant):
        if variant.startswith(("causal-", "char-")):
            return saved(corpus, variant, "contiguous", {"name": "causal-lm"})
        return saved(corpus, variant, "chunked", {"name": "masked-lm"})

    return made


@pytest.fixture(scope="module")
def pair_folder(saved, sentence_corpus):
    """`pair_folder(task)`: an ALBERT that was trained on a task of pairs."""

    def made(task):
        objective = {"name": "sentence-pairs", "pair_task": task}
        overrides = {"pair_head": True, "embedding_size": 16}
        return saved(sentence_corpus, "albert", "sentence-pairs", objective, **overrides)

    return made


def test_the_command_accepts_every_packing():
    """The command names them itself: its help must not import numpy."""
    parser = argparse.ArgumentParser()
    add_evaluate_arguments(parser)
    (option,) = (action for action in parser._actions if action.dest == "packing")
    assert set(option.choices) == set(SOURCES)


def test_lengths_are_a_table_and_what_was_measured_is_kept(folder, corpus, tmp_path, capsys):
    written = tmp_path / "scores.json"
    words = ["evaluate", folder("baseline"), "--data", str(corpus), "--json", str(written)]
    assert command_line.main([*words, "--lengths", "32,150,64", "--blocks", "7"]) == 1
    out, err = capsys.readouterr()
    masks, note, head, *rows = out.splitlines()
    assert masks == "validation: 15 % of the tokens masked, the same draws for every model"
    documents = len(Corpus(corpus, "valid"))
    assert f"every length scores the same targets of 7 of {documents} documents" in note
    assert f"{head}\n" == evaluation.heading("windows")
    short, refused, whole = json.loads(written.read_text())
    reason = "the model's learned positions end at 64"
    named = {"model": "baseline", "trained_length": 64}
    assert refused == {"length": 150, "refused": reason, **named}
    assert rows[1].split(maxsplit=1) == ["150", f"refused: {reason}"]
    for row, scores in ((rows[0], short), (rows[2], whole)):
        assert row.split()[:2] == [str(scores["length"]), str(scores["blocks"])]
        assert row.split()[-2] == f"{scores['total']['perplexity']:.2f}"
    assert err.endswith(f"error: 1 of 3 lengths were not measured: length 150: {reason}\n")


def test_blocks_with_nothing_to_predict_are_refused(saved, unpredictable, capsys):
    model = saved(unpredictable, "alibi", "complete", {"name": "masked-lm"})
    assert command_line.main(["evaluate", model, "--data", str(unpredictable)]) == 2
    error = capsys.readouterr().err
    assert "has nothing to predict: its 1 blocks of at most 64 tokens hold" in error
    assert "none of them is a target (validation: 15 %" in error


def test_a_kill_keeps_the_lengths_that_were_done(folder, corpus, tmp_path, monkeypatch, capsys):
    made = Windows.batches

    def batches(windows, objective, rows):
        if windows.length == 40:
            raise KeyboardInterrupt
        return made(windows, objective, rows)

    monkeypatch.setattr(Windows, "batches", batches)
    written = tmp_path / "scores.json"
    words = ["evaluate", folder("alibi"), "--data", str(corpus), "--json", str(written)]
    assert command_line.main([*words, "--lengths", "32,40,20"]) == 130
    assert [scores["length"] for scores in json.loads(written.read_text())] == [32]
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "32"


LENGTHS = ": write up to 1,000 different whole numbers of 2 or more and of at most 12 digits"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--blocks", "-1"], "--blocks -1: "),
        (["--stride", "0"], "--stride needs --lengths"),
        (["--plot", "a.png"], "--plot needs --lengths"),
        (["--lengths", "32", "--plot", "a.gif"], "a.gif: the name has to end in .png, .svg, .pdf"),
        (["--packing", "sentence-pairs"], "does not fit objective masked-lm"),
        (["--lengths", "32,64", "--stride", "33"], "33 is not accepted; it must be 1 to 32"),
        (["--lengths", "32,9000000"], "--lengths 9000000: the "),
        *((["--lengths", text], f"{text!r}{LENGTHS}") for text in ("", "32,32", "1", "3.5")),
        (["char-perceiver", "--lengths", "31", "--packing", "chunked"], "puts several documents"),
        (["char-perceiver", "--packing", "chunked"], "does not fit a model with 64 latents"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused_and_leave_no_file(
    folder, corpus, words, message, tmp_path, capsys
):
    variant, *words = words if words[0][0] != "-" else ["alibi", *words]
    files = ["--json", str(tmp_path / "a.json")]
    try:
        code = command_line.main(
            ["evaluate", folder(variant), "--data", str(corpus), *files, *words]
        )
    except SystemExit as stopped:  # by the parser
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_several_models_are_a_table_each_and_one_file(folder, corpus, tmp_path, capsys):
    files = [tmp_path / name for name in ("scores.json", "scores.svg")]
    words = ["--data", str(corpus), "--lengths", "32,64,150", "--stride", "30"]
    for option, file in zip(("--json", "--plot"), files, strict=True):
        words += [option, str(file)]
    folders = [folder("causal-rotary"), folder("causal-learned")]
    assert command_line.main(["evaluate", *folders, *words]) == 1
    out, err = capsys.readouterr()
    for name, block in zip(("causal-rotary", "causal-learned"), out[1:].split("\n\n"), strict=True):
        first, objective, note, head, *rows = block.splitlines()
        assert first == f"{name}, trained on blocks of 64 tokens"
        assert objective.startswith("validation: every token predicted from those before it")
        assert note.endswith(" documents, read as one text")
        assert f"{head}\n" == evaluation.heading("windows")
    refused = "causal-learned, length 150: the model's learned positions end at 64"
    assert err.endswith(f"error: 1 of 6 lengths were not measured: {refused}\n")
    results = json.loads(files[0].read_text())
    assert [r["model"] for r in results] == ["causal-rotary"] * 3 + ["causal-learned"] * 3
    assert {result["stride"] for result in results if "stride" in result} == {30}
    assert "<svg " in files[1].read_text()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda file: file.symlink_to("other")])
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_at_once(
    folder, corpus, tmp_path, capsys, monkeypatch, option, make
):
    monkeypatch.setattr(evaluate, "Windows", None)
    taken = tmp_path / "taken.png"
    make(taken)
    words = ["--data", str(corpus), "--lengths", "32", option, str(taken)]
    assert command_line.main(["evaluate", folder("alibi"), *words]) == 2
    assert f"error: {taken}: is a folder, a link or a device" in capsys.readouterr().err


def test_packing_chooses_one_text_or_documents(folder, corpus, tmp_path, capsys):
    model, file = folder("causal-alibi"), tmp_path / "scores.json"
    words = ["evaluate", model, "--data", str(corpus), "--lengths", "32", "--json", str(file)]
    valid, scores = Corpus(corpus, "valid"), {}
    for packing in ([], ["--packing", "contiguous"], ["--packing", "chunked"]):
        assert command_line.main([*words, *packing]) == 0
        (scores[" ".join(packing)],) = json.loads(file.read_text())
    assert scores[""] == scores["--packing contiguous"]
    assert scores[""]["blocks"] == -(-valid.lengths.sum() // 31)
    assert scores["--packing chunked"]["blocks"] == (-(-valid.lengths // 31)).sum()


def test_each_model_is_shown_with_the_packing_of_its_blocks(folder, corpus, capsys):
    """It is that of its training, so two models may read different blocks."""
    models = [folder("alibi"), folder("causal-alibi")]
    words = ["evaluate", *models, "--data", str(corpus), "--blocks", "1"]
    same = ["--packing", "chunked"]
    for chosen, shown in ([], ["chunked", "contiguous"]), (same, ["chunked", "chunked"]):
        assert command_line.main([*words, *chosen]) == 0
        assert re.findall("packing of the blocks: (.+)", capsys.readouterr().out) == shown


def test_models_of_the_same_folder_name_are_named_by_path(folder, corpus, capsys):
    models = [folder("alibi"), folder("alibi")]
    assert command_line.main(["evaluate", *models, "--data", str(corpus), "--blocks", "1"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{model}, trained on blocks" in out for model in models)


def test_models_with_a_pair_head_are_measured_on_both_tasks(
    pair_folder, sentence_corpus, tmp_path, capsys
):
    file, tasks = tmp_path / "scores.json", ["none", "nsp", "sop"]
    words = ["--data", str(sentence_corpus), "--blocks", "30", "--json", str(file)]
    assert command_line.main(["evaluate", *map(pair_folder, tasks), *words]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.endswith("pairs: sop")]
    found = json.loads(file.read_text())
    for row, result in zip(rows, found, strict=True):
        score = result["pairs"]["sop"]
        assert row.split()[-3] == f"{score['accuracy']:.1%}"
        # The weights are the same: so are the scores on a task, whatever the training.
        assert result["pairs"] == found[0]["pairs"]
    assert score.items() >= found[2]["terms"]["sop"].items()


def test_pairs_need_a_corpus_of_sentences(pair_folder, corpus, sentence_corpus, capsys):
    words = ["evaluate", pair_folder("sop"), "--data"]
    assert command_line.main([*words, str(corpus)]) == 2
    needed = f"{corpus}: its sequences are documents; prepare the corpus with --sentences"
    assert needed in capsys.readouterr().err
    assert command_line.main([*words, str(sentence_corpus), "--packing", "complete"]) == 2
    accepted = "accepted: packing sentence-pairs"
    assert accepted in capsys.readouterr().err


@pytest.fixture
def compared(run_ranks, recipe, tmp_path, capsys):
    """`compared(corpus, *overrides)`: the last validation of a run, and what `evaluate` finds."""

    def both(corpus, *overrides, ranks=1):
        words = [f"folder={tmp_path / 'run'}", f"data.corpus={corpus}", *overrides]
        words += ["spike.margin_steps=0", "schedule.warmup_steps=2"]
        assert run_ranks(ranks, train.main, [str(recipe.path), *words]) == [0] * ranks
        model, written = str(tmp_path / "model"), tmp_path / "scores.json"
        assert command_line.main(["export", str(tmp_path / "run"), "--output", model]) == 0
        words = ["--data", str(corpus), "--json", str(written)]
        assert command_line.main(["evaluate", model, *words]) == 0
        (found,) = json.loads(written.read_text())
        return lines_of(tmp_path / "run" / metrics.VALIDATION)[-1], found

    return both


CHUNKED = "data.packing=chunked"
LATENTS = ["model.variant=char-perceiver", "model.overrides.latents=16"]
LATENTS += ["objective.name=causal-lm", "data.packing=contiguous"]


@pytest.mark.parametrize(
    ("precision", "ranks", "overrides"),
    [
        ("fp32", 1, [CHUNKED]),
        ("bf16", 1, [CHUNKED, "objective.probability=0.4"]),
        ("fp32", 2, LATENTS),
    ],
)
def test_the_score_is_that_of_the_run_to_the_last_digit(
    precision, ranks, overrides, compared, corpus
):
    """Blocks, masks, length and micro-batches are the recipe's; a bf16 run rounds its weights.

    Whatever tokens the recipe predicts. Several ranks add their sums in another order.
    """
    overrides = [f"training.deepspeed=zero1_{precision}", "training.steps=6", *overrides]
    overrides += ["training.evaluation_blocks=5", "data.sequence_length=48"]
    logged, found = compared(corpus, *overrides, "batch.micro_batch_size=4", ranks=ranks)
    assert (logged["step"], found["length"], found["blocks"]) == (6, 48, 5)
    assert logged["targets"] == found["total"]["targets"]
    if (precision, ranks) == ("fp32", 1):
        assert {name: logged[name] for name in found["total"]} == found["total"]
        assert logged["subsets"] == found["subsets"]
    else:
        rounding = 1e-14 if precision == "fp32" else 2e-3
        assert logged["loss"] == pytest.approx(found["total"]["loss"], rel=rounding)


@pytest.mark.parametrize("task", ["nsp", "none"])
def test_scores_of_pairs_are_those_of_the_run_to_the_last_digit(task, compared, sentence_corpus):
    overrides = ["training.steps=4", "training.evaluation_blocks=6", "data.packing=sentence-pairs"]
    overrides += ["model.variant=albert"]
    overrides += [f"objective={{name: sentence-pairs, pair_task: {task}, longest_ngram: 3}}"]
    logged, found = compared(sentence_corpus, *overrides)
    assert {name: logged[name] for name in found["total"]} == found["total"]
    if task == "none":
        assert found["pairs"]["masked"].items() >= found["total"].items()
    else:
        assert found["terms"] == logged["terms"]
        assert found["pairs"]["nsp"].items() >= logged["terms"]["nsp"].items()


def test_a_command_takes_the_device_that_is_asked_for(corpus, folder, capsys, monkeypatch):
    from pretrain.engine import distributed

    model, flushed = folder("alibi"), []
    monkeypatch.setattr(distributed, "_flush_denormals", lambda: flushed.append(1))
    for words in (
        ["evaluate", model, "--data", str(corpus), "--blocks", "1"],
        ["fill-mask", model, "a <mask>"],
    ):
        assert command_line.main([*words, "--device", "cuda:1"]) == 2
        refused = f"zeroclap {words[0]}: error: --device cuda:1: this machine has cpu\n"
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


def test_a_filler_has_one_line_even_if_it_is_a_new_line(folder, capsys):
    words = ["fill-mask", folder("baseline"), "a <mask> b", "--top-k", "400"]
    assert command_line.main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 400
