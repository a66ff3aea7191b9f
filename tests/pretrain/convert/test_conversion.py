"""The convert command: from any form to any other, and what it refuses."""

import pytest

from data_prep import tokenizer as tokenizers
from pretrain.__main__ import main
from pretrain.inference import model_folder
from pretrain.model.classification import ClassificationConfig
from tests.pretrain.convert.test_fairseq import write
from tests.pretrain.inference.contents import random_contents


@pytest.fixture(scope="module")
def contents():
    vocabulary = tokenizers.train(iter(["some words to learn a few merges from"] * 20), 280)
    heads = {"topic": ClassificationConfig(2, ("no", "yes"))}
    return random_contents("zero-clap", vocabulary, heads, {"step": 3})


@pytest.fixture
def model(contents, tmp_path):
    model_folder.save_model(tmp_path / "model", contents)
    return tmp_path / "model"


def test_a_checkpoint_without_vocabulary_converts_with_a_note(tmp_path, capsys):
    checkpoint = tmp_path / "model.pt"
    write(checkpoint, "zero-clap")
    words = ["convert", str(checkpoint), "--to", "zeroclap", "--output"]
    assert main([*words, str(tmp_path / "without")]) == 0
    note = capsys.readouterr().out
    assert "without" in note
    assert "--tokenizer" in note
    assert model_folder.load_model(tmp_path / "without").vocabulary is None
    assert main(["fill-mask", str(tmp_path / "without"), "a <mask>"]) == 2
    assert "has no vocabulary" in capsys.readouterr().err


def wrong_inputs(model, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no checkpoint")
    return [
        ([tmp_path / "nowhere"], "nowhere: holds no model"),
        ([tmp_path / "empty"], "empty: holds no model"),
        ([tmp_path / "text.pt"], "text.pt"),
        ([model, "--tokenizer", model], "has its own vocabulary"),
        ([model, "--tokenizer", tmp_path / "no-words"], "no-words"),
        ([model, "--head", "topic"], "--head: only --to huggingface takes it"),
        ([model, "--head", "none", "--to", "huggingface"], "none"),
    ]


def test_impossible_conversions_are_refused_in_one_line_and_write_nothing(model, tmp_path, capsys):
    for (source, *options), message in wrong_inputs(model, tmp_path):
        output = tmp_path / "out"
        form = [] if "--to" in options else ["--to", "zeroclap"]
        arguments = ["convert", source, *form, "--output", output, *options]
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) <= 2
        assert not output.exists()


@pytest.mark.parametrize("form", ["zeroclap", "huggingface"])
def test_existing_outputs_are_not_overwritten(form, model, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("theirs")
    assert main(["convert", str(model), "--to", form, "--output", str(taken)]) == 2
    assert str(taken) in capsys.readouterr().err
    assert (taken / "file").read_text() == "theirs"
    assert [path.name for path in taken.iterdir()] == ["file"]
