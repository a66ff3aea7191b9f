"""Rows of fine-tuning: their layout, what is predicted, and their order."""

import numpy as np
import pytest

from data_prep.tokenizer import train_characters
from finetune.birthplaces.questions import Question
from finetune.birthplaces.rows import AnswerBatches, AnswerObjective, encode
from pretrain.objectives.tokens import IGNORED

TOKENIZER = train_characters(["abcdefghij ?"])
BOS, MASK = TOKENIZER.bos_id, TOKENIZER.mask_id


def ids(text):
    return TOKENIZER.encode_batch([text])[0].tolist()


def asked(*pairs):
    return [Question(f"f.tsv: line {n}", *pair) for n, pair in enumerate(pairs, start=1)]


def test_a_row_is_question_mask_answer_mask_and_the_rest_from_the_first_mask_is_predicted():
    encoded = encode(asked(("ab?", "cd"), ("a?", "e")), TOKENIZER, 32, with_answers=True)
    first, second = (row.tolist() for row in encoded.rows)
    assert first == [BOS, *ids("ab?"), MASK, *ids("cd"), MASK]
    arrays = AnswerObjective(MASK).collate(encoded.rows, 10)
    assert arrays["input_ids"].tolist()[1] == [*second, *[TOKENIZER.pad_id] * 4]
    assert arrays["document_ids"].sum(axis=1).tolist() == [8, 6]
    used = arrays["labels"] != IGNORED
    at, labels = arrays["target_positions"][used], arrays["labels"][used]
    # A token is predicted one place before its own.
    assert at.tolist() == [3, 4, 5, 6, 10 + 2, 10 + 3, 10 + 4]
    assert labels.tolist() == [MASK, *ids("cd"), MASK, MASK, *ids("e"), MASK]
    assert AnswerObjective(MASK).targets(arrays) == (7,)


def test_questions_alone_end_with_the_mask():
    (row,) = encode(asked(("ab?", None)), TOKENIZER, 32, with_answers=False).rows
    assert row.tolist() == [BOS, *ids("ab?"), MASK]


def test_characters_that_the_vocabulary_lacks_are_counted():
    questions = asked(("aXX?", "b"), ("aX?", "Y"), ("aY?", "c"))
    encoded = encode(questions, TOKENIZER, 32, with_answers=True)
    assert [len(row) for row in encoded.rows] == [8, 7]
    assert encoded.rows[0].tolist().count(TOKENIZER.unk_id) == 2
    assert encoded.left_out == 1
    assert dict(encoded.unknown) == {"X": 2, "Y": 1}
    assert encoded.notes[0].endswith("lacks a character of the answer: 1")
    assert "read as <unk>: 3, such as 'X', 'Y'" in encoded.notes[1]
    assert encode(asked(("a?", "b")), TOKENIZER, 32, with_answers=True).notes == []
    # What is asked, in contrast, keeps all its rows.
    assert len(encode(questions, TOKENIZER, 32, with_answers=False).rows) == 3
    with pytest.raises(ValueError, match=r"f.tsv: line 1: this and every other answer"):
        encode(asked(("a?", "Y")), TOKENIZER, 32, with_answers=True)


@pytest.mark.parametrize(("with_answers", "most"), [(True, 9), (False, 10)])
def test_a_row_that_is_longer_than_the_block_is_refused(with_answers, most):
    def encoded(characters):
        question = asked(("a?", "b"), ("a" * (characters - with_answers), "b"))
        return encode(question, TOKENIZER, 12, with_answers=with_answers)

    assert len(encoded(most).rows[1]) == 12
    with pytest.raises(ValueError, match=rf"line 2: .* {most + 1} .* at most {most}"):
        encoded(most + 1)


def batches(seed, count=10, size=4):
    rows = [np.array([BOS, 4 + n, MASK, 4 + n, MASK]) for n in range(count)]
    return AnswerBatches(rows, size, seed, AnswerObjective(MASK))


def read_in(made, steps):
    found = [made.micro_batches(step, 0, 1)[0] for step in steps]
    return [row[1] - 4 for batch in found for row in batch.arrays["input_ids"].tolist()]


def test_every_epoch_reads_every_row_once_in_an_order_of_its_own():
    order = read_in(batches(seed=1), range(5))  # two epochs of ten rows
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert len({tuple(order[:10]), tuple(order[10:]), tuple(range(10))}) == 3
    assert read_in(batches(seed=1), range(5)) == order
    assert read_in(batches(seed=2), range(5)) != order
    assert batches(seed=1).epoch(5) == 2
