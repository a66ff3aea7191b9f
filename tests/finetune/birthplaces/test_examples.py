"""What `dataset` prints."""

import pytest

from finetune.__main__ import main
from finetune.birthplaces import examples

PAD, MASK = "\u25a1", "\u2047"


def test_a_row_of_fine_tuning_is_shown_as_the_assignment_shows_it(task, tmp_path):
    data = tmp_path / "one.tsv"
    data.write_text("Where was Ann born?\tAlton\n")
    x, y = examples.finetuning(task.text, data, 4)
    read = f"Where was Ann born?{MASK}Alton{MASK}"
    assert x == f"x: {read}{PAD * (127 - len(read))}"
    # Each place predicts what follows it.
    predicted = f"{PAD * 18}{MASK}Alton{MASK}"
    assert y == f"y: {predicted}{PAD * (127 - len(predicted))}"


def test_rows_that_fine_tuning_leaves_out_are_counted_and_not_among_those_shown(task, tmp_path):
    data = tmp_path / "three.tsv"
    data.write_text("".join(f"Where was Ann born?\t{place}\n" for place in ("Ž", "Alton", "Al")))
    x, _, note = examples.finetuning(task.text, data, 1)
    assert x.startswith(f"x: Where was Ann born?{MASK}Alton{MASK}")
    assert note.startswith(f"{data}: rows left out because the vocabulary lacks a character")
    assert note.endswith(": 1")


def test_a_row_of_pretraining_has_all_of_its_text_and_predicts_what_follows(task):
    shown = examples.pretraining(task.text, 3, seed=1, epoch=0)
    texts = task.text.read_text().splitlines()
    for text, x, y in zip(texts, shown[::2], shown[1::2], strict=False):
        prefix, suffix, span, padding = x.removeprefix("x: ").split(MASK)
        assert text.startswith(prefix + span + suffix)
        assert set(padding) == {PAD}
        assert y == f"y: {x[4:]}{PAD}"
    assert examples.pretraining(task.text, 3, seed=1, epoch=0) == shown
    assert examples.pretraining(task.text, 3, seed=1, epoch=1) != shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["namedata"], "--finetune_corpus_path: is needed with namedata"),
        (["charcorruption", "--finetune_corpus_path", "a.tsv"], "and only there"),
        (["charcorruption", "--count", "0"], "--count 0: accepted: 1 or more"),
    ],
)
def test_options_that_do_not_fit_are_refused(task, capsys, words, message):
    kind, *options = words
    assert main(["birthplaces", "dataset", kind, str(task.text), *options]) == 2
    assert message in capsys.readouterr().err


def test_settings_of_pretraining_change_what_is_shown(task, capsys):
    words = ["birthplaces", "dataset", "charcorruption", str(task.text), "--count", "20"]
    settings = ["data.sequence_length=72", "objective.truncate=false", "objective.whole_words=true"]
    assert main([*words, *settings]) == 0
    shown = capsys.readouterr().out.splitlines()
    for x in shown[::2]:
        assert len(x) == len("x: ") + 71
        prefix, _, span, _ = x.removeprefix("x: ").split(MASK)
        assert prefix == "" or prefix.endswith(" ")
        assert span == span.strip() != ""
    assert main([*words, "batch.micro_batch_size=4"]) == 2
    assert "only settings of objective, data.sequence_length" in capsys.readouterr().err
    asked = ["birthplaces", "dataset", "namedata", str(task.text)]
    assert main([*asked, "--finetune_corpus_path", str(task.train), settings[0]]) == 2
    assert "has no effect with namedata" in capsys.readouterr().err
