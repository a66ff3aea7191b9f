"""How examples become rows: what labels stand on, windows of long texts; and the scores."""

import numpy as np
import pytest

from data_prep import tokenizer as tokenizers
from finetune import scores
from finetune.examples import Example
from finetune.kinds import IGNORED, KINDS
from finetune.task import Task
from tests.finetune.conftest import WORDS

TAGS = Task("ner", "tags", ("tokens",), "tags", ("O", "X", "Y"))
SPANS = Task("qa", "spans", ("question", "context"), "answers", ())


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return tokenizers.load(tiny_model)


@pytest.fixture(scope="module")
def unigram():
    return tokenizers.train_unigram(iter([" ".join([*WORDS, "unhappily"])] * 50), 290)


@pytest.mark.parametrize("kind", ["tokenizer", "unigram"])
def test_the_first_token_of_each_word_has_its_tag(request, kind):
    tokenizer = request.getfixturevalue(kind)
    words, tags = ("unhappily", "the", "dog", "ab-c", "é", "x"), (1, 0, 2, 1, 0, 2)
    (row,) = KINDS["tags"].rows(TAGS, [Example(words, tags)], tokenizer, 64, 2)
    assert row.target[row.target != IGNORED].tolist() == list(tags)
    assert row.places[row.places >= 0].tolist() == list(range(len(words)))
    assert (row.places >= 0).tolist() == (row.target != IGNORED).tolist()
    first = [tokenizer.decode(row.ids[1:n].tolist()) for n in np.flatnonzero(row.places >= 0)]
    # The text before a word's first token is the words before it.
    assert [text.split() for text in first] == [list(words[:n]) for n in range(len(words))]


def test_words_beyond_the_longest_input_are_outside_of_entities(tokenizer):
    example = Example(("dog",) * 30, (1,) * 30)
    rows = KINDS["tags"].rows(TAGS, [example], tokenizer, 12, 2)
    assert rows[0].is_cut
    outputs = [np.tile(np.float32([0, 1, 0]), (len(rows[0].ids), 1))]
    (found,) = KINDS["tags"].predictions(TAGS, [example], rows, outputs)
    inside = found.index("O")
    assert found == ["X"] * inside + ["O"] * (30 - inside)
    assert 0 < inside < 12


@pytest.mark.parametrize("limit", [24, 40, 400])
def test_windows_of_a_long_text_have_every_answer_whole_at_the_right_place(tokenizer, limit):
    rng = np.random.default_rng(0)
    words = [WORDS[n] for n in rng.integers(len(WORDS), size=90)]
    context = " ".join(words)
    starts = np.cumsum([0] + [len(word) + 1 for word in words])
    examples = [
        Example(("where", context), ((int(starts[n]), int(starts[n]) + len(words[n])),))
        for n in range(90)
    ]
    rows = KINDS["spans"].rows(SPANS, examples, tokenizer, limit, 2)
    assert max(len(row.ids) for row in rows) <= limit
    seen = dict.fromkeys(range(90), 0)
    for row in rows:
        first, last = row.target
        if last:
            start, end = row.places[first, 0], row.places[last, 1]
            ((right, until),) = examples[row.source].label
            assert context[start:end].strip() == context[right:until]
            seen[row.source] += 1
    assert min(seen.values()) >= 1
    # Logits that point to the targets give every answer back.
    outputs = []
    for row in rows:
        output = np.zeros((len(row.ids), 2), dtype=np.float32)
        output[row.target[0], 0] = output[row.target[1], 1] = 9.0
        outputs.append(output)
    found = KINDS["spans"].predictions(SPANS, examples, rows, outputs)
    assert scores.exact_match(KINDS["spans"].truth(SPANS, examples), found) == 1


def test_no_answer_is_given_where_every_window_prefers_none(tokenizer):
    task = Task("qa", "spans", ("question", "context"), "answers", ("no-answer",))
    example = Example(("who", "the old dog"), ())
    rows = KINDS["spans"].rows(task, [example], tokenizer, 40, 2)
    assert [row.target.tolist() for row in rows] == [[0, 0]]
    output = np.zeros((len(rows[0].ids), 2), dtype=np.float32)
    output[0] = 1
    assert KINDS["spans"].predictions(task, [example], rows, [output]) == [""]
    assert KINDS["spans"].predictions(SPANS, [example], rows, [output]) != [""]


@pytest.mark.parametrize(
    ("answers", "found", "exact", "overlap"),
    [
        (("The Norman", "Normans"), "normans!", 1, 1),
        (("10th and 11th centuries", "in the 10th"), "the 10th century", 0, 1 / 2),
        (("",), "", 1, 1),
        (("",), "something", 0, 0),
        (("a cat",), "", 0, 0),
        (("the",), "", 1, 1),
        (("An apple, a pear",), "pear apple", 0, 1),
    ],
)
def test_scores_of_answers_are_those_of_the_official_script(answers, found, exact, overlap):
    """The figures are those that SQuAD 2.0's evaluation script gives."""
    assert scores.exact_match([answers], [found]) == exact
    assert scores.overlap_f1([answers], [found]) == pytest.approx(overlap)


def test_entities_are_counted_whole():
    right = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"]]
    found = [["B-PER", "O", "O", "B-LOC"], ["B-PER", "B-LOC"]]
    assert scores.entity_precision(right, found) == pytest.approx(2 / 4)
    assert scores.entity_recall(right, found) == pytest.approx(2 / 3)
    assert scores.entity_f1(right, found) == pytest.approx(4 / 7)
    assert scores.tag_accuracy(right, found) == pytest.approx(4 / 6)
