"""The command `evaluate`: options, tables and files."""

import argparse
import csv
import json

import pytest
import torch

from data_prep import tokenizer as tokenizers
from data_prep.corpus import Corpus
from pretrain import __main__ as command_line
from pretrain.data.sources import SOURCES
from pretrain.data.windows import Windows
from pretrain.model import presets
from pretrain.model.language_model import LanguageModel
from pretrain.models import evaluate as evaluation
from pretrain.models.evaluate_command import add_evaluate_arguments
from pretrain.models.model_folder import ModelContents, save
from pretrain.records import metrics
from pretrain.train import __main__ as train


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A function of a variant: the folder of a model with random weights."""

    def made(variant):
        torch.manual_seed(0)
        size = tokenizers.load(corpus).vocab_size
        model = LanguageModel(presets.build("tiny", variant, size, {}))
        path = tmp_path_factory.mktemp("models") / variant
        weights = model.state_dict()
        recipe = {"data": {"sequence_length": 64, "packing": "chunked"}}
        if model.config.causal:
            recipe["data"]["packing"] = "contiguous"
            recipe["objective"] = {"name": "causal-lm"}
        provenance = {"recipe": recipe}
        save(path, ModelContents(model.config, weights, tokenizers.load(corpus), provenance))
        return str(path)

    return made


@pytest.fixture(scope="module")
def pair_folder(sentence_corpus, tmp_path_factory):
    """A function of a pair task: the folder of an ALBERT with random weights."""

    def made(task):
        torch.manual_seed(0)
        tokenizer = tokenizers.load(sentence_corpus)
        overrides = {"pair_head": True, "embedding_size": 16}
        config = presets.build("tiny", "albert", tokenizer.vocab_size, overrides)
        recipe = {
            "data": {"sequence_length": 64, "packing": "sentence-pairs"},
            "objective": {"name": "sentence-pairs", "pair_task": task},
        }
        path = tmp_path_factory.mktemp("models") / task
        weights = LanguageModel(config).state_dict()
        save(path, ModelContents(config, weights, tokenizer, {"recipe": recipe}))
        return str(path)

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
    assert command_line.main([*words, "--lengths", "32,150,64", "--blocks", "7"]) == 2
    out, err = capsys.readouterr()
    documents = len(Corpus(corpus, "valid"))
    masks, note, head, *rows = out.splitlines()
    assert masks == "validation: 15 % of the tokens masked, the same draws for every model"
    assert f"the same targets at every length, of 7 of {documents} documents" in note
    columns = ["length", "windows", "targets", "coverage", "loss", "perplexity", "accuracy"]
    assert head.split() == columns
    short, refused, whole = json.loads(written.read_text())
    reason = "the model's learned positions end at 64"
    named = {"model": "baseline", "trained_length": 64}
    assert refused == {"length": 150, "refused": reason, **named}
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--blocks", "-1"], "--blocks -1: accepted: 0 (all) or more"),
        (["--stride", "8"], "--stride: accepted only with --lengths"),
        (["--stride", "0"], "--stride: accepted only with --lengths"),
        (["--interpolate"], "--interpolate: accepted only with --lengths"),
        (["--plot", "a.png"], "--plot: accepted only with --lengths or --layers"),
        (["--layers", "--lengths", "32"], "--layers: accepted only without --lengths"),
        (["--layers", "--stride", "8"], "--stride: accepted only with --lengths"),
        (["--layers", "--plot", "a.pdf"], "--plot a.pdf: accepted: a file name that ends"),
        (["--packing", "sentence-pairs"], "does not fit objective masked-lm"),
        (["--lengths", "32", "--plot", "a.pdf"], "--plot a.pdf: accepted: a file name that ends"),
        (["--lengths", "32,64", "--stride", "33"], "--stride 33: accepted: 1 to 32"),
        (["--lengths", "32,64", "--stride", "0"], "--stride 0: accepted: 1 to 32"),
        (["--lengths", "32,9000000"], "--lengths 9000000: the "),
    ],
)
def test_options_that_mean_nothing_are_refused(folder, corpus, words, message, capsys):
    assert command_line.main(["evaluate", folder("alibi"), "--data", str(corpus), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--lengths", "31", "--packing", "chunked"],
            "--lengths puts several documents into a row, which the model's 64 latents read as "
            "one; accepted: --packing contiguous",
        ),
        (
            ["--packing", "chunked"],
            "packing chunked does not fit a model with 64 latents, which reads a block as one "
            "text; accepted: packing complete or contiguous or one-document",
        ),
        (
            ["--layers"],
            "has latents, and its layers work on different vectors; accepted: mod",
        ),
    ],
)
def test_what_latents_cannot_be_measured_on_is_refused(folder, corpus, words, message, capsys):
    perceiver = folder("char-perceiver")
    assert command_line.main(["evaluate", perceiver, "--data", str(corpus), *words]) == 2
    assert message in capsys.readouterr().err
    assert command_line.main(["evaluate", perceiver, "--data", str(corpus), "--lengths", "31"]) == 0


def test_what_is_refused_leaves_no_file(folder, corpus, tmp_path, capsys):
    files = ["--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png")]
    model = ["evaluate", folder("causal-alibi"), "--data", str(corpus)]
    assert command_line.main([*model, "--lengths", "64,99999999", *files]) == 2
    assert "fewer than one window" in capsys.readouterr().err
    assert not list(tmp_path.glob("a.*"))


@pytest.mark.parametrize("lengths", ["", "32,", "32,x", "1", "32;64", "-5", "3.5"])
def test_lengths_that_are_no_numbers_are_refused(corpus, lengths, capsys):
    words = ["evaluate", "model", "--data", str(corpus), f"--lengths={lengths}"]
    with pytest.raises(SystemExit) as stop:
        command_line.main(words)
    assert stop.value.code == 2
    assert f"{lengths!r}: write whole numbers from 2 on, as in 512,1024" in capsys.readouterr().err


def test_several_models_are_a_table_each_and_one_file(folder, corpus, tmp_path, capsys):
    files = [tmp_path / name for name in ("scores.json", "scores.csv", "scores.png")]
    words = ["--data", str(corpus), "--lengths", "32,64,150", "--stride", "30", "--interpolate"]
    for option, file in zip(("--json", "--csv", "--plot"), files, strict=True):
        words += [option, str(file)]
    folders = [folder("causal-rotary"), folder("causal-learned")]
    assert command_line.main(["evaluate", *folders, *words]) == 2
    out, err = capsys.readouterr()
    rotary, learned = out.removeprefix("\n").split("\n\n")
    for name, block in (("causal-rotary", rotary), ("causal-learned", learned)):
        first, objective, note, head, *rows = block.splitlines()
        assert first == f"{name}, trained on blocks of 64 tokens"
        assert objective.startswith("validation: every token predicted from those before it")
        assert "documents, read as one text of " in note
        assert head.split()[-1] == "interpolated"
        assert [row.split()[-1] for row in rows[:2]] == ["-", "-"]
        title, edges, *by_position = rows[3:]
        assert title.startswith("perplexity by the number of tokens before the target")
        assert edges.split()[:4] == ["length", "0", "16", "32"]
        assert len(by_position) == 3 if name == "causal-rotary" else 2
    assert float(rotary.splitlines()[6].split()[-1]) > 1
    refused = "causal-learned, length 150: the model's learned positions end at 64"
    assert err.endswith(f"error: 1 of 6 lengths were not measured: {refused}\n")

    results = json.loads(files[0].read_text())
    assert [r["model"] for r in results] == ["causal-rotary"] * 3 + ["causal-learned"] * 3
    assert {result["stride"] for result in results if "stride" in result} == {30}
    lines = list(csv.DictReader(files[1].read_text().splitlines()))
    for result in results[:5]:
        mine = {
            line["part"]: float(line["perplexity"])
            for line in lines
            if (line["model"], line["length"]) == (result["model"], str(result["length"]))
        }
        expected = {f"from {n} tokens": s["perplexity"] for n, s in result["positions"].items()}
        if result["interpolated"]:
            expected["interpolated"] = result["interpolated"]["perplexity"]
        assert mine == {"all": result["total"]["perplexity"], **expected}
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--json", "--csv", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_at_once(
    folder, corpus, tmp_path, capsys, monkeypatch, option
):
    monkeypatch.setattr(evaluation, "Windows", None)
    taken = tmp_path / "taken.png"
    taken.mkdir()
    words = ["--data", str(corpus), "--lengths", "32", option, str(taken)]
    assert command_line.main(["evaluate", folder("alibi"), *words]) == 2
    assert capsys.readouterr().err.endswith(f"error: {taken}: Is a directory\n")


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


def test_models_of_the_same_folder_name_are_named_by_path(folder, corpus, tmp_path, capsys):
    models = [folder("alibi"), folder("alibi")]
    assert command_line.main(["evaluate", *models, "--data", str(corpus), "--blocks", "1"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{model}, trained on blocks" in out for model in models)


def test_models_with_a_pair_head_are_one_table_of_both_tasks(
    pair_folder, sentence_corpus, tmp_path, capsys
):
    file, table = tmp_path / "scores.json", tmp_path / "scores.csv"
    tasks = ["none", "nsp", "sop"]
    words = ["--data", str(sentence_corpus), "--blocks", "30", "--json", str(file)]
    models = [pair_folder(task) for task in tasks]
    assert command_line.main(["evaluate", *models, *words, "--csv", str(table)]) == 0
    *_, columns, none, nsp, sop = capsys.readouterr().out.splitlines()
    assert columns.split() == ["model", "trained", "on", "tokens", "MLM", "pairs", "NSP", "SOP"]
    found = json.loads(file.read_text())
    assert [each["pair_task"] for each in found] == tasks
    lines = list(csv.DictReader(table.read_text().splitlines()))
    for task, row, result in zip(tasks, (none, nsp, sop), found, strict=True):
        scores = result["pairs"]
        expected = [task, task, f"{scores['masked']['targets']:,}"]
        for name in ("masked", "nsp", "sop"):
            score = scores[name]
            error = (score["accuracy"] * (1 - score["accuracy"]) / score["targets"]) ** 0.5
            assert score["standard_error"] == pytest.approx(error)
            expected += ["30"] if name == "nsp" else []
            expected += [f"{score['accuracy']:.1%}", "±", f"{error:.1%}"]
            (line,) = (x for x in lines if (x["model"], x["part"]) == (task, name))
            assert float(line["accuracy"]) == score["accuracy"]
        assert row.split() == expected
    # The weights are the same: so are the scores on a task, whatever the training.
    assert (
        found[0]["pairs"]["sop"]
        == found[2]["pairs"]["sop"]
        == found[2]["terms"]["sop"] | {"standard_error": found[2]["pairs"]["sop"]["standard_error"]}
    )


@pytest.mark.parametrize("more", [[], ["--layers"]])
def test_pairs_need_a_corpus_of_sentences(pair_folder, corpus, sentence_corpus, more, capsys):
    words = ["evaluate", pair_folder("sop"), *more, "--data"]
    assert command_line.main([*words, str(corpus)]) == 2
    needed = f"{corpus}: its sequences are documents; accepted: a corpus prepared with --sentences"
    assert needed in capsys.readouterr().err
    assert command_line.main([*words, str(sentence_corpus), "--packing", "complete"]) == 2
    accepted = "accepted: packing sentence-pairs"
    assert accepted in capsys.readouterr().err


def test_layers_of_several_models_are_one_table_and_one_file(folder, corpus, tmp_path, capsys):
    files = [tmp_path / name for name in ("layers.json", "layers.csv", "layers.png")]
    words = ["--data", str(corpus), "--layers"]
    for option, file in zip(("--json", "--csv", "--plot"), files, strict=True):
        words += [option, str(file)]
    folders = [folder("causal-rotary"), folder("albert")]
    assert command_line.main(["evaluate", *folders, *words]) == 0
    rotary, albert, _, names, columns, *rows = capsys.readouterr().out.splitlines()
    assert names.split() == ["causal-rotary", "albert"]
    results = json.loads(files[0].read_text())
    assert [(x["model"], x["length"]) for x in results] == [("causal-rotary", 64), ("albert", 64)]
    for note, result in zip((rotary, albert), results, strict=True):
        assert note == (
            f"{result['model']}: {result['tokens']:,} tokens in {result['blocks']} blocks of 64"
        )
    for number, row in enumerate(rows):
        layers = [result["layers"][number] for result in results]
        cells = [
            (f"{x['distance']:.3f}", f"{x['cosine']:.4f}", f"{x['degrees']:.2f}") for x in layers
        ]
        assert row.split() == [str(number + 1), *cells[0], *cells[1]]
    assert len(rows) == 2
    assert len(files[1].read_text().splitlines()) == 1 + 2 * 2
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_the_blocks_of_layers_can_be_chosen(folder, corpus, tmp_path, capsys):
    file = tmp_path / "layers.json"
    words = ["evaluate", folder("causal-alibi"), "--data", str(corpus), "--layers"]
    blocks = len(SOURCES["contiguous"](Corpus(corpus, "valid"), 64))
    for option, expected in (
        ([], min(32, blocks)),
        (["--blocks", "3"], 3),
        (["--blocks", "0"], blocks),
    ):
        assert command_line.main([*words, *option, "--json", str(file)]) == 0
        assert json.loads(file.read_text())[0]["blocks"] == expected


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


@pytest.mark.parametrize("task", ["nsp", "none"])
def test_scores_of_pairs_are_those_of_the_run_to_the_last_digit(
    task, run_ranks, recipe, sentence_corpus, tmp_path, capsys
):
    overrides = [f"folder={tmp_path / 'run'}", f"data.corpus={sentence_corpus}", "training.steps=4"]
    overrides += ["training.evaluation_blocks=6", "data.packing=sentence-pairs"]
    overrides += ["data.min_token_coverage=0", "model.variant=albert", "spike.margin_steps=0"]
    overrides += [f"objective={{name: sentence-pairs, pair_task: {task}, longest_ngram: 3}}"]
    overrides += ["schedule.warmup_steps=2"]
    assert run_ranks(1, train.main, [str(recipe.path), *overrides]) == [0]
    model, written = str(tmp_path / "model"), tmp_path / "scores.json"
    assert command_line.main(["export", str(tmp_path / "run"), "--output", model]) == 0
    words = ["--data", str(sentence_corpus), "--json", str(written)]
    assert command_line.main(["evaluate", model, *words]) == 0
    (found,) = json.loads(written.read_text())
    logged = metrics.read(tmp_path / "run" / metrics.VALIDATION)[-1]
    assert found["pair_task"] == task
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
