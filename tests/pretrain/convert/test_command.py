"""The import command: what it says, and what it refuses."""

from pretrain.__main__ import main
from pretrain.convert.model_folder import load_model
from tests.pretrain.convert.test_fairseq import HEADS, vocabulary, write


def test_a_checkpoint_becomes_a_folder_that_every_command_reads(tmp_path, capsys):
    checkpoint, words = tmp_path / "model.pt", tmp_path / "tokenizer.json"
    write(checkpoint, "zero-clap", rows=264)
    vocabulary(made_up=3).save(words)
    command = ["import", str(checkpoint), "--output"]
    assert main([*command, str(tmp_path / "model"), "--tokenizer", str(words)]) == 0
    assert "ZeroclapForMaskedLM in Python: AutoModelForMaskedLM" in capsys.readouterr().out
    assert main(["fill-mask", str(tmp_path / "model"), "a <mask>"]) == 0
    assert main([*command, str(tmp_path / "without")]) == 0
    assert "reads ids, not text (--tokenizer names one)" in capsys.readouterr().out
    assert load_model(tmp_path / "without").vocabulary is None
    assert main(["fill-mask", str(tmp_path / "without"), "a <mask>"]) == 2
    assert "has no vocabulary" in capsys.readouterr().err


def test_a_checkpoint_with_classification_heads_becomes_one_model_or_the_other(tmp_path, capsys):
    checkpoint = tmp_path / "model.pt"
    write(checkpoint, "baseline", HEADS)
    command = ["import", str(checkpoint), "--output"]
    assert main([*command, str(tmp_path / "words")]) == 0
    assert "classification heads were left out: score, topic (--head)" in capsys.readouterr().out
    assert load_model(tmp_path / "words").classifier is None
    assert main([*command, str(tmp_path / "topic"), "--head", "topic"]) == 0
    loaded = load_model(tmp_path / "topic")
    assert (loaded.classifier.config, loaded.has_head) == (HEADS["topic"], False)
    assert main(["fill-mask", str(tmp_path / "topic"), "a <mask>"]) == 2
    assert "has no head over the vocabulary" in capsys.readouterr().err


def test_wrong_inputs_are_refused_in_one_line_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no checkpoint")
    checkpoint, taken = tmp_path / "model.pt", tmp_path / "taken"
    write(checkpoint, "baseline", HEADS)
    taken.mkdir()
    (taken / "file").write_text("theirs")
    for words, message in (
        ([tmp_path / "nowhere"], "nowhere: no such file; accepted: a fairseq checkpoint"),
        ([tmp_path / "empty"], "empty: is a folder; accepted: a fairseq checkpoint"),
        ([tmp_path / "text.pt"], "text.pt"),
        ([checkpoint, "--tokenizer", tmp_path / "no-words"], "no-words"),
        ([checkpoint, "--head", "none"], "has no classification head 'none'; it has score, topic"),
        ([checkpoint], str(taken)),
    ):
        output = taken if message == str(taken) else tmp_path / "out"
        assert main(["import", "--output", str(output), *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) <= 2
        assert not (tmp_path / "out").exists()
    assert (taken / "file").read_text() == "theirs"
    assert [path.name for path in taken.iterdir()] == ["file"]
