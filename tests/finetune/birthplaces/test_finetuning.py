"""Fine-tuning to answers, and the commands' refusals."""

import json
import os
import shlex

import pytest

from data_prep.common.files import lock
from finetune.__main__ import main
from finetune.birthplaces import answering, finetuning, questions
from finetune.birthplaces.models import Choice
from finetune.birthplaces.pretraining import run_folder
from pretrain.models import model_folder


def finetune(run_ranks, choice, task, reading, output, data=None, **settings):
    def train():
        os.chdir(output.parent)
        finetuning.finetune(choice, task.text, reading, output, data or task.train, **settings)

    run_ranks(1, train)
    (folder,) = (output.parent / "expt").glob(f"finetune/*/{output.name}-*")
    return folder


def test_a_fresh_model_learns_to_repeat_the_answers_of_its_training(
    run_ranks, task, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(finetuning, "BATCH_SIZE", 6)
    data = tmp_path / "few.tsv"
    data.write_text("".join(task.train.read_text().splitlines(keepends=True)[:6]))
    choice, output = Choice("perceiver", 48), tmp_path / "model"
    settings = {"learning_rate": 1e-2, "epochs": 80, "overrides": tiny}
    folder = finetune(run_ranks, choice, task, None, output, data, **settings)
    shown = answering.evaluate(choice, task.text, output, data, tmp_path / "predictions")
    assert shown.endswith("correct: 6 of 6, 100.0 %")
    answers = [question.answer for question in questions.read_questions(data)]
    assert (tmp_path / "predictions").read_text().splitlines() == answers
    steps = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 80
    assert json.loads(steps[-1])["loss"] < 0.1 < json.loads(steps[0])["loss"]
    assert {"lock", "metrics.jsonl", "tensorboard"} == {path.name for path in folder.iterdir()}
    assert folder.parent.name == "run_perceiver_48_ft_lr_0.010000_seed_1"
    loaded = model_folder.load_model(output)
    assert loaded.objective.name == "span-corruption"  # and so the model is known to be causal
    assert loaded.provenance["optimizer"]["learning_rate"] == 1e-2
    assert loaded.provenance["steps"] == 80


def test_few_rows_are_one_batch_and_every_epoch_a_whole_number_of_steps(run_ranks, task, tmp_path):
    model = {"overrides": ["model.size=tiny"], "epochs": 3}
    rows = len(questions.read_questions(task.train))
    finetune(run_ranks, Choice("vanilla"), task, None, tmp_path / "model", **model)
    provenance = model_folder.load_model(tmp_path / "model").provenance
    assert (provenance["batch_size"], provenance["steps"]) == (rows, 3)


def test_an_epoch_of_a_row_more_than_a_batch_is_not_two_batches(
    run_ranks, task, tmp_path, monkeypatch
):
    rows = len(questions.read_questions(task.train))
    monkeypatch.setattr(finetuning, "BATCH_SIZE", rows - 1)
    model = {"overrides": ["model.size=tiny"], "epochs": 3}
    finetune(run_ranks, Choice("vanilla"), task, None, tmp_path / "model", **model)
    assert model_folder.load_model(tmp_path / "model").provenance["steps"] == 4


def test_the_same_seed_gives_the_same_weights_bit_for_bit(run_ranks, task, tmp_path):
    def train(name):
        words = f"""birthplaces finetune vanilla {task.text} --finetune_corpus_path {task.train}
            --writing_params_path {name} --epochs 2 --seed 3 model.size=tiny"""

        def run():
            os.chdir(tmp_path)
            return main(shlex.split(words))

        assert run_ranks(1, run) == [0]
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert train("first") == train("second")


def test_a_run_that_another_process_trains_is_left_alone(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    choice, output, overrides = Choice("vanilla"), tmp_path / "model", ["model.size=tiny"]
    architecture = choice.config(overrides).architecture(256)
    folder = run_folder("finetune", "run", architecture, output, 1, finetune_rate=6e-4)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}")
    with (
        lock(folder / "lock", "busy"),
        pytest.raises(ValueError, match="another process trains this model"),
    ):
        finetuning.finetune(choice, task.text, None, output, task.train, overrides=overrides)
    assert (folder / "metrics.jsonl").read_text() == "{}"


def test_several_ranks_are_refused(task, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    words = f"""birthplaces finetune vanilla {task.text} --finetune_corpus_path {task.train}
        --writing_params_path {tmp_path}/model"""
    assert main(shlex.split(words)) == 2
    assert "2 ranks: this command uses one" in capsys.readouterr().err


def test_pretrained_weights_are_where_training_starts(run_ranks, task, make_model, tmp_path):
    import torch

    reading = make_model(Choice("vanilla"), tmp_path / "pretrained")
    output = tmp_path / "model"
    settings = {"learning_rate": 1e-9, "epochs": 1, "overrides": ["optimizer.weight_decay=0"]}
    finetune(run_ranks, Choice("vanilla"), task, reading, output, **settings)
    before, after = model_folder.load_model(reading), model_folder.load_model(output)
    for name, weights in before.model.state_dict().items():
        torch.testing.assert_close(after.model.state_dict()[name], weights, rtol=0, atol=1e-7)
    assert after.tokenizer.digest() == before.tokenizer.digest()
    assert after.provenance["task"] == "birthplaces"


def test_evaluation_says_where_there_are_no_answers(task, make_model, tmp_path, capsys):
    model = make_model(Choice("vanilla"), tmp_path / "model")
    asked = tmp_path / "inputs.tsv"
    asked.write_text("Where was Ann born?\nWhere was Žofia born?\n")
    words = f"""birthplaces evaluate vanilla {task.text} --reading_params_path {model}
        --eval_corpus_path {asked} --outputs_path {tmp_path}/predictions --device cpu"""
    assert main(shlex.split(words)) == 0
    shown = capsys.readouterr().out
    assert "no accuracy: the file has no answers" in shown
    assert "the vocabulary lacks, read as <unk>: 1, such as 'Ž'" in shown
    assert (tmp_path / "predictions").read_text().count("\n") == 2
    assert main(shlex.split(words)) == 2
    assert f"{tmp_path}/predictions: exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--finetune_corpus_path {long}", "long.tsv: line 1: .* accepted: at most 125, because"),
        ("--finetune_corpus_path {train} --epochs 0", "--epochs 0: accepted: 1 or more"),
        ("--finetune_corpus_path {train} --finetune_lr 0", "--finetune_lr 0.0: accepted: above 0"),
        ("--finetune_corpus_path {train} --reading_params_path a model.size=tiny", "no effect"),
        ("--finetune_corpus_path {train} model.init_from=a", "'model.init_from=a': has no effect"),
        ("--finetune_corpus_path {train} model.overrides.causal=false", "causal: False .* true"),
        ("--finetune_corpus_path {train} model.overrides.mask_embedding=zero", "must be 'row'"),
        ("--finetune_corpus_path {train} --reading_params_path {text}", "is not a model folder"),
        ("--finetune_corpus_path /nowhere.tsv", "/nowhere.tsv: No such file"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_made(
    task, tmp_path, capsys, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.tsv").write_text(f"Where was {'Ann ' * 30}born?\tAlton\n")
    words = words.format(text=task.text, train=task.train, long=tmp_path / "long.tsv")
    begin = f"birthplaces finetune vanilla {task.text} --writing_params_path {tmp_path}/model "
    assert main(shlex.split(begin + words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m finetune birthplaces finetune: error: ")
    assert error.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)
    assert {path.name for path in tmp_path.iterdir()} == {"long.tsv"}
