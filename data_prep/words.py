"""Words of a text, and runs of n of them (n-grams), as 64-bit hashes.

Texts are compared without case, by words alone, in Unicode's compatibility form (NFKC): "ﬁ" is
"fi", and it does not matter how an accent is encoded. A word is a run of letters, digits, marks and
"_"; punctuation and symbols of all scripts divide words. Each Chinese character or kana is a word,
because they are written without spaces. Invisible characters, such as soft hyphens, count for
nothing.

    "The cat, the CAT." -> the cat the cat -> 2-grams: the cat, cat the, the cat
    "第3章：Ａ－Ｂ" -> 第 3 章 a b

The hashes are the same on every machine and with every version of numpy; the categories of
characters are those of Python's version of Unicode. The hashes are not keyed: someone who knows
them can make texts that collide.
"""

import hashlib
import re
import string
import unicodedata
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_PIECE_CHARACTERS = 1 << 14  # hashed at a time; the arrays fit into a core's cache
_BLOCK_WORDS = 1 << 14  # whose n-grams are hashed at a time
_LOWER = string.ascii_lowercase.encode()
# ASCII characters to those of words in lower case; all others to 0.
_WORD_BYTES = bytes(
    ord(chr(byte).lower())
    if chr(byte).lower().encode() in _LOWER or chr(byte) in "0123456789_"
    else 0
    for byte in range(128)
) + bytes(128)
_DIVIDES, _IN_WORD, _ALONE, _MARK, _IGNORED = range(5)
"""Kinds of characters; a mark belongs to the word before it."""
_STAND_ALONE = ((0x3000, 0x9FFF), (0xF900, 0xFAFF), (0x1B000, 0x1B16F), (0x20000, 0x3FFFF))
_INVISIBLE = {0x034F, 0x0640, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}
"""Joiner, tatweel, variation selectors; and the category Cf, but for the space of width zero."""
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
_MOST_EXPANDED = 18
"""Characters that NFKC makes of one, at most."""


def random_numbers(name: str, count: int) -> Hashes:
    """Return `count` fixed pseudo-random 64-bit numbers."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(8 * count), "<u8")


def _powers(base: int, count: int) -> Hashes:
    with np.errstate(over="ignore"):
        return np.concatenate(
            [[np.uint64(1)], np.full(count - 1, base, np.uint64).cumprod(dtype=np.uint64)]
        )


_POWERS = _powers(_BASE, _MOST_EXPANDED * _PIECE_CHARACTERS)
_INVERSES = _powers(pow(_BASE, -1, 1 << 64), _MOST_EXPANDED * _PIECE_CHARACTERS)


def word_hashes(text: str) -> Hashes:
    """Return the hashes of a text's words, uint64 [words].

    A word of over 16,000 characters may count as several.
    """
    found = [np.empty(0, np.uint64)]
    start = 0
    while start < len(text):
        end = _end_of_piece(text, start)
        found.append(_word_hashes(text[start:end]))
        start = end
    return np.concatenate(found)


def _end_of_piece(text: str, start: int) -> int:
    """Return where to cut: between two words or, in one that is too long, two characters."""
    end = start + _PIECE_CHARACTERS
    if end >= len(text):
        return len(text)
    if (space := max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))) > 0:
        return space
    kinds = _kinds()
    between = (n for n in range(end, start, -1) if kinds[ord(text[n])] in (_DIVIDES, _ALONE))
    whole = (n for n in range(end, start, -1) if kinds[ord(text[n])] != _MARK)
    return next(between, next(whole, end))


def _word_hashes(piece: str) -> Hashes:
    """Hash the words of a piece: sums of character * base ** (place in the word)."""
    if piece.isascii():
        codes: npt.NDArray[np.integer] = np.frombuffer(
            piece.encode().translate(_WORD_BYTES), np.uint8
        )
        is_word = codes != 0
        is_start = is_word.copy()
        is_start[1:] &= ~is_word[:-1]
    else:
        codes, is_start = _characters(piece)
    starts = np.flatnonzero(is_start)
    if not len(starts):
        return np.empty(0, np.uint64)
    sums: Hashes = np.add.reduceat(codes * _POWERS[: len(codes)], starts)
    return mixed(sums * _INVERSES[starts])


def _characters(piece: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Return the characters as they are compared, 0 between words, and where words start."""
    if not unicodedata.is_normalized("NFKC", piece):
        piece = _compatible().sub(lambda found: unicodedata.normalize("NFKC", found[0]), piece)
        piece = unicodedata.normalize("NFKC", piece)
    codes = np.frombuffer(piece.casefold().encode("utf-32-le", "surrogatepass"), "<u4")
    kinds = _kinds().take(codes)
    top = kinds.max()
    if top == _IGNORED:
        is_seen = kinds != _IGNORED
        codes, kinds = codes[is_seen], kinds[is_seen]
    is_word = kinds != _DIVIDES
    if top >= _MARK:  # of marks, those that follow a letter or such a mark
        is_mark = kinds == _MARK
        last = np.maximum.accumulate(np.where(is_mark, 0, np.arange(len(kinds))))
        is_word = is_word[last] & ~is_mark[last]
    is_start = is_word.copy()
    is_start[1:] &= ~is_word[:-1]
    if top >= _ALONE:
        is_alone = kinds == _ALONE
        is_start |= is_alone
        is_start[1:] |= is_alone[:-1] & (kinds[1:] == _IN_WORD)
    return codes * is_word, is_start


@cache
def _compatible() -> re.Pattern[str]:
    """Match the characters that NFKC replaces, such as full-width ones.

    Where there are none, `unicodedata.normalize` returns most texts as they are; else it takes ten
    times as long.
    """
    found = (chr(n) for n in range(0x10000) if unicodedata.decomposition(chr(n))[:1] == "<")
    return re.compile(f"[{re.escape(''.join(found))}]+")


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """Return the kind of each of Unicode's characters, uint8 [0x110000]."""
    kind_of = {"L": _IN_WORD, "N": _IN_WORD, "M": _MARK}
    kind_of |= {"Co": _IN_WORD, "Cn": _IN_WORD, "Cf": _IGNORED}
    categories = map(unicodedata.category, map(chr, range(0x110000)))
    kinds = np.fromiter(
        (kind_of.get(name) or kind_of.get(name[0], _DIVIDES) for name in categories), np.uint8
    )
    for first, last in _STAND_ALONE:
        part = kinds[first : last + 1]
        part[part == _IN_WORD] = _ALONE
    kinds[ord("_")] = _IN_WORD
    kinds[sorted(_INVISIBLE)] = _IGNORED
    kinds[0x200B] = _DIVIDES
    return kinds


def ngram_hashes(words: Hashes, size: int) -> Iterator[Hashes]:
    """Yield the hashes of the n-grams of `size` words in order, in blocks; none of fewer words."""
    for start in range(0, len(words) - size + 1, _BLOCK_WORDS):
        end = min(start + _BLOCK_WORDS, len(words) - size + 1)
        sums = np.zeros(end - start, np.uint64)
        for place, power in enumerate(_POWERS[:size]):
            sums += words[start + place : end + place] * power
        yield mixed(sums)


def ngrams_at(words: Hashes, places: npt.NDArray[np.intp], size: int) -> Hashes:
    """Return the hashes of the n-grams of `size` words that begin at these places."""
    sums = np.zeros(len(places), np.uint64)
    for place, power in enumerate(_POWERS[:size]):
        sums += words[places + place] * power
    return mixed(sums)


def mixed(numbers: Hashes) -> Hashes:
    """Spread every bit of the numbers over all 64 (a bijection, splitmix64's finalizer)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
