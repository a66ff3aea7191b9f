"""Files of questions and answers, rows of ids, what is predicted of them, and their order."""

from pathlib import Path

import numpy as np
import pytest

from data_prep.tokenizer import train_characters
from finetune.birthplaces.rows import AnswerObjective, answer_batches, encode, read_rows, score
from pretrain.objectives.base import Block
from pretrain.objectives.tokens import IGNORED

TOKENIZER = train_characters(["abcdefghij ?"])
BOS, MASK = TOKENIZER.bos_id, TOKENIZER.mask_id
FILE = Path("f.tsv")


def ids(text):
    return TOKENIZER.encode_batch([text])[0].tolist()


def test_a_file_has_answers_in_every_row_or_in_none(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("Who is A?\tGraz\nWho is B?\tNew York \n\n")
    assert read_rows(path) == [["Who is A?", "Graz"], ["Who is B?", "New York"]]
    path.write_text("Where was A?\r\nWhere was B?")
    assert read_rows(path, with_answers=False) == [["Where was A?"], ["Where was B?"]]
    with pytest.raises(ValueError, match=r"row 'Where was A\?': must be question<TAB>answer"):
        read_rows(path)
    with pytest.raises(ValueError, match=r"none\.tsv: no such file\Z"):  # no other format is read
        read_rows(tmp_path / "none.tsv")


@pytest.mark.parametrize(
    "content", ["a?\tx\nb?\n", "a?\nb?\tx\n", "a?\tx\ty\n", "a?\t\n", "", b"a?\tx\nb?\t\xff\n"]
)
def test_a_row_of_another_form_is_refused(tmp_path, content):
    path = tmp_path / "rows.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"rows\.tsv: "):
        read_rows(path, with_answers="\t" in str(content))


def test_only_equal_answers_count():
    rows = [("q", answer) for answer in ("York", "New York", "york")]
    assert score(rows, ["York"] * 3) == "correct: 1 of 3, 33.3 %"
    assert score([("q",)], ["York"]) == "no accuracy: the file has no answers"


def test_a_row_is_question_mask_answer_mask_and_the_rest_from_the_first_mask_is_predicted():
    rows = encode([("ab?", "cd"), ("a?", "e")], TOKENIZER, 32, FILE)
    first, second = (row.tolist() for row in rows)
    assert first == [BOS, *ids("ab?"), MASK, *ids("cd"), MASK]
    assert encode([("ab?",)], TOKENIZER, 32, FILE)[0].tolist() == first[:5]
    arrays = AnswerObjective(MASK).collate([*map(Block, rows)], [(1, 0, 0)] * 2, 10)
    assert arrays["input_ids"].tolist()[1] == [*second, *[TOKENIZER.pad_id] * 4]
    assert arrays["document_ids"].sum(axis=1).tolist() == [8, 6]
    used = arrays["labels"] != IGNORED
    at, labels = arrays["target_positions"][used], arrays["labels"][used]
    # A token is predicted one place before its own.
    assert at.tolist() == [3, 4, 5, 6, 10 + 2, 10 + 3, 10 + 4]
    assert labels.tolist() == [MASK, *ids("cd"), MASK, MASK, *ids("e"), MASK]
    assert AnswerObjective(MASK).targets(arrays) == (7,)


def test_characters_that_the_corpus_lacks_are_counted_in_questions_and_refused_in_answers(capsys):
    first, _ = encode([("aXX?", "b"), ("aX?", "c")], TOKENIZER, 32, FILE)
    assert first.tolist().count(TOKENIZER.unk_id) == 2
    assert capsys.readouterr().out.endswith("read as <unk>: 3\n")
    with pytest.raises(ValueError, match="answer 'Y': has characters"):
        encode([("a?", "b"), ("a?", "Y")], TOKENIZER, 32, FILE)


@pytest.mark.parametrize(("answer", "most"), [(["b"], 8), ([], 10)])
def test_a_row_that_is_longer_than_the_block_is_refused(answer, most):
    (row,) = encode([("a" * most, *answer)], TOKENIZER, 12, FILE)
    assert len(row) == 12
    with pytest.raises(ValueError, match="13 tokens .* at most 12"):
        encode([("a" * (most + 1), *answer)], TOKENIZER, 12, FILE)


def test_batches_are_as_long_as_their_longest_row_and_count_tokens_and_targets():
    """Their order is that of all fine-tuning (test_finetune_batches)."""
    rows = [np.array([BOS, *[4] * n, MASK, 5, MASK]) for n in range(1, 5)]
    (batch,) = answer_batches(rows, 4, 1, AnswerObjective(MASK)).micro_batches(0, 0, 1)
    assert batch.arrays["input_ids"].shape == (4, 8)
    assert (batch.tokens, batch.targets) == (5 + 6 + 7 + 8, (12,))
