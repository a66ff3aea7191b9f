import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import words
from data_prep.words import ngram_hashes, ngrams_at, word_hashes

TEXTS = st.text(alphabet="aAbÉé09_ .,'\n\t\u00a0“”—。漢字か한", max_size=60)


def words_of(text):
    """Return the words as a regular expression finds them; Chinese and kana stand alone."""
    return [word.lower() for word in re.findall(r"[漢字か]|[aAbÉé09_한]+", text)]


EQUAL = [
    ("l’élève étudie « le chat »", unicodedata.normalize("NFD", "L'ÉLÈVE étudie le chat")),
    ("第3章：我 是 学 生。", "第３章我是学生"),
    ("ﬁne ｆｕｌｌ－ｗｉｄｔｈ，ｗｏｒｄｓ", "fine full width words"),
    ("مرحبا، بالعالم؟", "مرحبا بالعالم"),
    ("नमस्ते।दुनिया॥", "नमस्ते दुनिया"),
    ("a→b ☃c €5+6×7 😀d", "a b c 5 6 7 d"),
    ("l´eau ¨ x\u0301y", "l eau x\u0301y"),
    ("soft\u00adhyphen می\u200cخواهم \ufeffx", "softhyphen میخواهم x"),
    ("zero\u200bwidth", "zero width"),
    ("ｶﾞ", "ガ"),
    ("STRASSE ΟΔΟΣ", "straße οδος"),
]


@pytest.mark.parametrize(("text", "same"), EQUAL)
def test_punctuation_symbols_and_encoding_do_not_matter(text, same):
    assert word_hashes(text).tolist() == word_hashes(same).tolist()


def test_every_character_that_is_punctuation_a_symbol_or_a_space_divides_words():
    whole = word_hashes("a b").tolist()
    for number in range(0x110000):
        character = chr(number)
        is_one = unicodedata.category(character)[0] in "PSZ" and character != "_"
        form = unicodedata.normalize("NFKC", character)
        if is_one and not any(part.isalnum() or part == "_" for part in form):
            assert word_hashes(f"a{character}b").tolist() == whole, f"U+{number:04X}"


def test_letters_and_marks_of_every_script_do_not_divide_words():
    for word in ("நன்றி", "ขอบคุณ", "תּוֹדָה", "ọpẹ́", "감사합니다", "𐤔𐤋𐤌"):
        assert len(word_hashes(word)) == 1
    assert len(word_hashes("ありがとう")) == 5


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_equal_words_alone_have_equal_hashes(texts):
    hash_of: dict[str, int] = {}
    for text in texts:
        found, expected = word_hashes(text).tolist(), words_of(text)
        assert len(found) == len(expected)
        for word, number in zip(expected, found, strict=True):
            assert hash_of.setdefault(word, number) == number
    assert len(set(hash_of.values())) == len(hash_of)


def test_pieces_of_a_long_text_cut_no_word(monkeypatch):
    generator = np.random.default_rng(0)
    text = " ".join(map(str, generator.integers(0, 10**9, 2000)))
    whole = [int(word_hashes(word)[0]) for word in text.split()]
    assert len(text) > words._PIECE_CHARACTERS
    assert word_hashes(text).tolist() == whole
    monkeypatch.setattr(words, "_PIECE_CHARACTERS", 100)
    assert word_hashes(text).tolist() == whole
    assert len(word_hashes("a" * 1050)) == 11  # a word that is longer than a piece


SEPARATED = ("the ", "b\t", "c,", "naïve\n", "é—é\u00a0", "한。", "漢", "字か", "猫x ", "\ue000\n")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(SEPARATED), max_size=40), st.integers(20, 60))
def test_pieces_are_cut_between_words_in_any_script(parts, piece_characters):
    text = "".join(parts)
    whole = word_hashes(text).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_PIECE_CHARACTERS", piece_characters)
        assert word_hashes(text).tolist() == whole


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="aé한𐤔", max_size=60), st.integers(4, 20))
def test_pieces_of_a_word_that_is_too_long_are_cut_between_characters(word, piece_characters):
    expected, piece = [], ""
    for character in word:
        if len(piece + character) > piece_characters:
            expected.append(piece)
            piece = ""
        piece += character
    expected += [piece] * bool(piece)
    hashes = [number for each in expected for number in word_hashes(each).tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_PIECE_CHARACTERS", piece_characters)
        assert word_hashes(word).tolist() == hashes


def test_hashes_are_the_same_in_every_version():
    found = word_hashes("The cat, the CAT: 猫。")
    assert found.tolist() == [
        *(11469020329213407588, 6049514579037760470) * 2,
        6067664824428886470,
    ]
    assert next(ngram_hashes(found, 2)).tolist()[0] == 4714247663894338885


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 6), st.integers(1, 7))
def test_ngrams_are_equal_where_their_words_are(numbers, size, block_words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_BLOCK_WORDS", block_words)
        blocks = list(ngram_hashes(np.array(numbers, np.uint64), size))
    found = [number for block in blocks for number in block.tolist()]
    expected = [tuple(numbers[i : i + size]) for i in range(len(numbers) - size + 1)]
    assert len(found) == len(expected)
    assert len(set(found)) == len(set(expected)) == len(set(zip(found, expected, strict=True)))
    places = np.arange(len(expected))[::-1]
    at = ngrams_at(np.array(numbers, np.uint64), places, size)
    assert at.tolist() == found[::-1]
