import itertools
import time

import numpy as np
import pytest

from data_prep.sentences import cut_lengths, encode_sentences, sentences


@pytest.mark.parametrize(
    "marked",
    [
        # | marks where a sentence has to begin.
        "One sentence.| Another one!| A third?| And a last…| End.",
        "no full stop at all",
        "Dr. Smith met Mr. and Mrs. Jones of St. Louis.| They left.",
        "J. R. R. Tolkien wrote it.| H. americanus is a lobster.",
        "The U.S. Army and the U.K. Parliament agreed.| Both did.",
        "Many animals, e.g. Cats, i.e. Felines, cf. Dogs, are kept.| Good.",
        "See No. 5, Fig. 2, pp. 3 and vol. 7 of Jan. 12.| He said no.| Then yes.",
        "It costs 3.14 dollars, or .5 a piece.| 7 people paid.",
        "Read https://example.org/a.b?c=d!e and x.y.z, or mail a.b@c.de today.| Thanks.",
        "Wait... what?| No...| Nothing.",
        '"What?" he asked.| "Go!"| She went.',
        "He said (loudly.)| [Nobody came.]| “Quotes.”| ‘More.’| «Encore.»| End.",
        "Yahoo! bought it.",
        "1. First item.|\n 2. Second item.",
        "A heading|\n\nA text.| On two\nlines.|\n \t\n Next",
        "What?!| Really!!!| Yes.",
        "これは文です。|次の文です！|終わり？|はい。",
        "彼は「はい。」と言った。|そして去った。",
        "这是第一句。|这是第二句。| 第三句。",
        "Это предложение.| Это другое.| А это «третье».",
        "यह एक वाक्य है।| यह दूसरा है।",
        "  leading space.| Trailing space.  \n",
        "\n\nleading lines|\n\ntrailing lines\n\n\n",
        "tabs.\tand|\n\t\nmore.|\tAnd",
    ],
)
def test_sentences_begin_at_the_marked_places(marked):
    assert sentences(marked.replace("|", "")) == marked.split("|")


def random_texts():
    generator = np.random.default_rng(0)
    alphabet = np.array(list("aAéΩ中1 \n\t\u00a0.!?…。」\"')(,:-।"))
    return ["".join(generator.choice(alphabet, size)) for size in generator.integers(0, 60, 2000)]


def test_joined_sentences_are_the_text_and_none_is_blank():
    for text in random_texts():
        found = sentences(text)
        assert "".join(found) == text
        assert all(not sentence.isspace() for sentence in found) or text.isspace()
    assert sentences("") == []


REPEATED = (".", ". ", '."', '."."x', "。", "A.", "\n", " \n", "\n ", "x\n\n", "?\n", "1. ", "a")


@pytest.mark.parametrize("unit", [*REPEATED, " ", "…A "])
def test_time_is_linear_in_the_text(unit):
    for end in ("", "A", " A", "\n\nA"):
        text = unit * (50_000 // len(unit)) + end
        started = time.process_time()
        assert "".join(sentences(text)) == text
        assert time.process_time() - started < 1  # 0.02 s; quadratic time is 3 s or more


def test_ids_of_sentences_separated_by_white_space_are_those_of_the_text(tokenizer):
    texts = [text.replace("。", "!").replace("।", "?") for text in random_texts()]
    ids, lengths = encode_sentences(texts, tokenizer.encode_batch)
    whole = tokenizer.encode_batch(texts)
    assert [document.tolist() for document in ids] == [document.tolist() for document in whole]
    assert [sum(document) for document in lengths] == [len(document) for document in whole]
    assert [len(document) for document in lengths] == [len(sentences(text)) for text in texts]
    assert all(document.dtype == np.int32 for document in ids)


@pytest.mark.parametrize("seed", range(20))
def test_cut_lengths_sum_to_the_pieces_and_the_sentences(seed):
    """Of all pieces, or without the last one."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 9, 30).tolist()
    inner = np.unique(generator.integers(0, sum(lengths) + 1, 12))
    pieces = np.diff([0, *inner, sum(lengths)])[: len(inner) + 1 - seed % 2]
    within = cut_lengths(lengths, pieces.tolist())
    assert [sum(piece) for piece in within] == pieces.tolist()
    parts = [*itertools.chain(*within)]
    assert all(parts)
    ends = np.cumsum(parts)
    found = {*np.cumsum(lengths).tolist(), *np.cumsum(pieces).tolist()} - {0}
    assert set(ends) == {end for end in found if end <= sum(pieces)}


def test_cutting_many_sentences_into_many_windows_takes_linear_time():
    count = 100_000
    started = time.process_time()
    assert len(cut_lengths([3] * count, [2] * (count * 3 // 2))) == count * 3 // 2
    # 0.1 s; a look at all sentences for each, half an hour
    assert time.process_time() - started < 3
