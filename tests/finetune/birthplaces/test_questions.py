"""TSV files of questions, and their scores."""

import os
from pathlib import Path

import pytest

from finetune.__main__ import main
from finetune.birthplaces import questions


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_file_has_answers_in_every_row_or_in_none(tmp_path):
    both = questions.read_questions(
        write(tmp_path / "both.tsv", "Who is A?\tGraz\nWho is B?\tLinz\n")
    )
    assert [(q.text, q.answer) for q in both] == [("Who is A?", "Graz"), ("Who is B?", "Linz")]
    none = questions.read_questions(write(tmp_path / "none.tsv", "Where was A?\r\nWhere was B?"))
    assert [(q.text, q.answer) for q in none] == [("Where was A?", None), ("Where was B?", None)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a?\tx\nb?\n", "line 2: 'b\\?' is not accepted; it must be question<TAB>answer"),
        ("a?\nb?\tx\n", "line 1: 'a\\?'"),
        ("a?\tx\ty\n", "line 1: .* must be question<TAB>answer"),
        ("a?\t\n", "line 1"),
        ("\tx\n", "line 1"),
        ("a?\tx\n\nb?\ty\n", "line 2: ''"),
        ("", "is empty"),
        (b"a?\tx\nb?\t\xff\n", "line 2: is not UTF-8: invalid start byte"),
        ("a" * 100 + "?\n" + "b?\tx\n", f"line 1: '{'a' * 77}\\.\\.\\.' is not accepted"),
    ],
)
def test_a_row_of_another_form_is_refused_with_its_line(tmp_path, content, message):
    path = write(tmp_path / "rows.tsv", content)
    with pytest.raises(ValueError, match=f"rows.tsv: {message}"):
        questions.read_questions(path)


def test_rows_without_answers_are_refused_where_answers_are_needed(tmp_path):
    path = write(tmp_path / "rows.tsv", "a?\nb?\n")
    with pytest.raises(ValueError, match="line 1: 'a\\?' is not accepted"):
        questions.read_questions(path, with_answers=True)


def test_only_equal_answers_count():
    asked = [questions.Question("", "q", answer) for answer in ("York", "New York", "york")]
    assert questions.score(asked, ["York", "York", "York"]) == (1, 3)
    assert questions.score_line((1, 3)) == "correct: 1 of 3, 33.3 %"
    assert questions.score([questions.Question("", "q", None)], ["York"]) is None


def test_a_constant_answer_is_scored_as_every_prediction_is(tmp_path, capsys):
    path = write(tmp_path / "rows.tsv", "a?\tLondon\nb?\tYork\nc?\tLondon\n")
    for words, shown in (([], "2 of 3, 66.7 %"), (["--answer", "York"], "1 of 3, 33.3 %")):
        assert main(["birthplaces", "london", "--eval_corpus_path", str(path), *words]) == 0
        assert capsys.readouterr().out == f"correct: {shown}\n"


def test_london_is_right_for_one_in_twenty_of_the_assignments_development_set(capsys):
    shared = os.environ.get("ZEROCLAP_SHARED")
    if not shared:
        pytest.skip("ZEROCLAP_SHARED is not set; it names the folder that holds data/birthplaces/")
    path = Path(shared) / "data" / "birthplaces" / "birth_dev.tsv"
    assert main(["birthplaces", "london", "--eval_corpus_path", str(path)]) == 0
    assert capsys.readouterr().out == "correct: 25 of 500, 5.0 %\n"
