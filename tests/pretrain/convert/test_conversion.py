"""The convert command: from any form to any other, and what it refuses."""

import pytest
import torch

from data_prep import tokenizer as tokenizers
from pretrain.__main__ import main
from pretrain.convert import conversion
from pretrain.model.classification import ClassificationConfig
from pretrain.models import model_folder
from tests.pretrain.models.contents import random_contents


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    tokenizer = tokenizers.train(iter(["some words to learn a few merges from"] * 20), 280)
    tokenizer.save(tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")
    return tokenizer


@pytest.fixture(scope="module", params=["baseline", "zero-clap"])
def contents(request, vocabulary):
    heads = {"topic": ClassificationConfig(2, ("no", "yes"))}
    return random_contents(request.param, vocabulary, heads, {"step": 3})


@pytest.fixture
def model(contents, tmp_path):
    model_folder.save_model(tmp_path / "model", contents)
    return tmp_path / "model"


def same_weights(ours, theirs, without=()):
    kept = {k: v for k, v in theirs.items() if not k.startswith(tuple(without))}
    assert ours.keys() == kept.keys()
    return all(torch.equal(ours[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("first", conversion.FORMS)
@pytest.mark.parametrize("second", conversion.FORMS)
def test_weights_survive_conversion_from_any_form_to_any_other_and_back(
    first, second, contents, model, vocabulary, tmp_path, capsys
):
    file = str(tmp_path / "vocabulary.json")
    vocabulary.save(tmp_path / "vocabulary.json")
    source = model
    for number, form in enumerate([first, second, "zeroclap"]):
        output = tmp_path / f"{number}-{form}"
        # only a fairseq checkpoint holds no vocabulary
        extra = ["--tokenizer", file] if source.is_file() else []
        arguments = ["convert", str(source), "--to", form, "--output", str(output), *extra]
        assert main(arguments) == 0
        source = output
    back = model_folder.load_model(source).contents()
    assert back.config == contents.config
    assert back.vocabulary.digest() == vocabulary.digest()
    # These hold one head: the language model's.
    without = ["classification_heads."] if "huggingface" in (first, second) else []
    assert same_weights(back.weights, contents.weights, without)
    if not without:
        assert back.classification_heads == contents.classification_heads
    capsys.readouterr()


def test_hf_is_another_name_for_huggingface(model, tmp_path, capsys):
    assert main(["convert", str(model), "--to", "hf", "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert capsys.readouterr().out.endswith("as huggingface\n")


def test_a_checkpoint_without_vocabulary_converts_with_a_note(model, tmp_path, capsys):
    checkpoint = tmp_path / "model.pt"
    conversion.convert(model, "fairseq", checkpoint)
    (note,) = conversion.convert(checkpoint, "zeroclap", tmp_path / "back")
    assert "without" in note
    assert "--tokenizer" in note
    assert model_folder.load_model(tmp_path / "back").vocabulary is None
    assert main(["fill-mask", str(tmp_path / "back"), "a <mask>"]) == 2
    assert "has no vocabulary" in capsys.readouterr().err


def wrong_inputs(model, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("theirs")
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


@pytest.mark.parametrize("form", conversion.FORMS)
def test_existing_outputs_are_not_overwritten(form, model, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("theirs")
    target = taken / "file" if form == "fairseq" else taken
    assert main(["convert", str(model), "--to", form, "--output", str(target)]) == 2
    assert str(target) in capsys.readouterr().err
    assert (taken / "file").read_text() == "theirs"
    assert [path.name for path in taken.iterdir()] == ["file"]
