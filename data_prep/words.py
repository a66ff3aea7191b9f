"""Words of a text, and runs of n of them (n-grams), as 64-bit hashes.

Texts are compared in lower case, by words alone. A word is a run of letters, digits and "_"; each
Chinese character or kana is a word, because they are written without spaces.

    "The cat, the CAT." -> the cat the cat -> 2-grams: the cat, cat the, the cat

The hashes are the same on every machine and with every version of numpy. They are not keyed:
someone who knows them can make texts that collide.
"""

import hashlib
import re
import string
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_PIECE_BYTES = 1 << 14  # hashed at a time; the arrays fit into a core's cache
_BLOCK_WORDS = 1 << 14  # whose n-grams are hashed at a time
_LETTERS = string.ascii_lowercase.encode()
# Bytes of UTF-8 to those of words in lower case; all others to 0.
_WORD_BYTES = bytes(
    byte if byte >= 0x80 or byte in _LETTERS + b"0123456789_" else 0 for byte in range(256)
)
# Spaces and punctuation beyond ASCII: first byte, range of the second, length in bytes.
_SEPARATORS = (
    (0xC2, 0x80, 0xBF, 2),  # U+0080 to U+00BF
    (0xE2, 0x80, 0x81, 3),  # U+2000 to U+207F
    (0xE3, 0x80, 0x80, 3),  # U+3000 to U+303F
)
_ALONE = (0xE3, 0xE9)  # first bytes of U+3000 to U+9FFF
# The text up to the last place between two words: before a separator, or a word that stands alone.
_UP_TO_A_WORD = re.compile(
    rb"(?s).*(?=[\0%c-%c]|%s)" % (*_ALONE, b"|".join(b"%c[%c-%c]" % row[:3] for row in _SEPARATORS))
)
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse


def random_numbers(name: str, count: int) -> Hashes:
    """Return `count` fixed pseudo-random 64-bit numbers."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(8 * count), "<u8")


def _powers(base: int, count: int) -> Hashes:
    with np.errstate(over="ignore"):
        return np.concatenate(
            [[np.uint64(1)], np.full(count - 1, base, np.uint64).cumprod(dtype=np.uint64)]
        )


_POWERS = _powers(_BASE, _PIECE_BYTES)
_INVERSES = _powers(pow(_BASE, -1, 1 << 64), _PIECE_BYTES)


def word_hashes(text: str) -> Hashes:
    """Return the hashes of a text's words, uint64 [words].

    A word of over 16 kB may count as several.
    """
    content = text.lower().encode().translate(_WORD_BYTES)
    is_ascii = len(content) == len(text)
    found = [np.empty(0, np.uint64)]
    start = 0
    while start < len(content):
        end = _end_of_piece(content, start)
        found.append(_word_hashes(content[start:end], is_ascii))
        start = end
    return np.concatenate(found)


def _end_of_piece(content: bytes, start: int) -> int:
    """Return where to cut: between two words or, in one that is too long, two characters."""
    end = start + _PIECE_BYTES
    if end >= len(content):
        return len(content)
    if between := _UP_TO_A_WORD.match(content, start + 1, end + 1):
        return between.end()
    while content[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end


def _word_hashes(content: bytes, is_ascii: bool) -> Hashes:
    """Hash the words of at most `_PIECE_BYTES`: sums of byte * base ** (place in the word)."""
    codes = np.frombuffer(content, np.uint8)
    if not is_ascii:
        codes = _without_separators(codes)
    is_word = codes != 0
    is_start = is_word.copy()
    is_start[1:] &= ~is_word[:-1]
    if not is_ascii:
        is_start |= (codes >= _ALONE[0]) & (codes <= _ALONE[1])
    starts = np.flatnonzero(is_start)
    if not len(starts):
        return np.empty(0, np.uint64)
    sums: Hashes = np.add.reduceat(codes * _POWERS[: len(codes)], starts)
    return mixed(sums * _INVERSES[starts])


def _without_separators(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    found = np.append(codes, np.zeros(2, np.uint8))
    for first, low, high, size in _SEPARATORS:
        places = np.flatnonzero(codes == first)
        second = found[places + 1]
        places = places[(second >= low) & (second <= high)]
        for place in range(size):
            found[places + place] = 0
    return found[: len(codes)]


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
