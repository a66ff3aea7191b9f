r"""Rule-based sentence splitting.

The rules are fixed, so that the same text gives the same sentences everywhere. In doubt the text is
not split. A sentence ends

- before a blank line;
- after . ! ? … and their equivalents in other scripts, including closing quotation marks and
  brackets, if white space follows and the next character is neither a lower-case letter nor a
  punctuation mark that continues the sentence; but not after an initial ("J. Smith", "U.S. Army"),
  a title ("Dr. Who"), "e.g.", "No." before a number, or the number of an item ("1. First");
- after a Chinese or Japanese full stop, unless a closing mark follows.

White space between two sentences belongs to the second one. The pretokeniser of GPT-2 attaches it
there too, so the ids of the sentences are those of the whole text where white space separates them.
"""

import re
from collections.abc import Sequence

import numpy as np

from data_prep.encoders import Encode, Ids

_WIDE_STOPS = "。！？｡"
_STOPS = ".!?…؟۔।॥" + _WIDE_STOPS
# Each pattern starts with a character that is quick to find, and its quantifiers are possessive:
# no text can make it slow.
_STOP = re.compile(
    rf"[{_STOPS}][{_STOPS}]*+[\"'”’»›)\]}}」』）】》〉]*+(?=(?P<space>\s*+)(?P<next>\S?))"
)
_BLANK_LINE = re.compile(r"\n[^\S\n]*+\n\s*+(?P<next>\S?)")
_GOES_ON = frozenset(",;:.!?…)]}%")
_NO_IDS = np.empty(0, dtype=np.int32)
_LONGEST_WORD = 12  # characters examined before a full stop
_WORD = re.compile(r"(?:\w\.)*[^\W\d_]+\Z")
_ITEM_NUMBER = re.compile(r"^\s*\d{1,3}\Z", re.MULTILINE)
_TITLE = re.compile(
    "mr|mrs|ms|messrs|mme|mlle|dr|prof|rev|hon|gen|col|maj|capt|cpt|lt|sgt|cmdr|gov|sen|rep|pres|"
    r"st|mt|ft|vs|cf|viz|al|approx|dept|univ|est|e\.g|i\.e"
)
_BEFORE_NUMBER = re.compile(
    "nos?|nr|figs?|eqs?|sec|ch|art|vols?|pp?|refs?|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|ca"
)


def sentences(text: str) -> list[str]:
    """Split a text into sentences that concatenate to the text.

    An empty text has no sentences. No sentence is white space only, unless the text is.
    """
    if not text:
        return []
    starts = {found.end() for found in _STOP.finditer(text) if _is_end(text, found)}
    starts |= {
        _before_space(text, found.start()) for found in _BLANK_LINE.finditer(text) if found["next"]
    }
    ordered = sorted(starts | {0})
    return [text[start:end] for start, end in zip(ordered, [*ordered[1:], len(text)], strict=True)]


def encode_sentences(texts: Sequence[str], encode: Encode) -> tuple[list[Ids], list[list[int]]]:
    """Encode each text sentence by sentence; return its ids and the lengths of its sentences.

    Args:
        texts: Documents.
        encode: Returns the ids of each of several texts.
    """
    parts = [sentences(text) for text in texts]
    encoded = iter(encode([sentence for part in parts for sentence in part]))
    documents = [[next(encoded) for _ in part] for part in parts]
    ids = [np.concatenate([_NO_IDS, *document]) for document in documents]
    return ids, [[len(sentence) for sentence in document] for document in documents]


def cut_lengths(lengths: Sequence[int], pieces: Sequence[int]) -> list[list[int]]:
    """Return the lengths of the sentences within each piece of a document, without empty ones.

    Args:
        lengths: Lengths of the document's sentences.
        pieces: Lengths of consecutive pieces that start at the document's first id. Their sum is
            at most the length of the document.
    """
    unread = iter(lengths)
    left = 0  # ids of the current sentence that are in no piece yet
    within = []
    for room in pieces:
        parts = []
        while room:
            left = left or next(unread)
            part = min(left, room)
            left, room = left - part, room - part
            if part:
                parts.append(part)
        within.append(parts)
    return within


def _before_space(text: str, position: int) -> int:
    while position and text[position - 1].isspace():
        position -= 1
    return position


def _is_end(text: str, stop: re.Match[str]) -> bool:
    space, following = stop["space"], stop["next"]
    marks = stop[0]
    if marks[-1] in _WIDE_STOPS:
        return bool(following)
    if not space or not following or following in _GOES_ON or following.islower():
        return False
    return marks != "." or not _goes_on_after_stop(text, stop.start(), following)


def _goes_on_after_stop(text: str, stop: int, following: str) -> bool:
    """Return whether the full stop at `stop` ends an abbreviation or the number of an item."""
    start = max(0, stop - _LONGEST_WORD)
    if _ITEM_NUMBER.search(text, start, stop):
        return True
    word = _WORD.search(text, start, stop)
    if word is None:
        return False
    name = word[0].lower()
    is_initial = len(name) == 1 or name[-2] == "."
    if is_initial and word[0][-1].isupper():
        return True
    return bool(_TITLE.fullmatch(name) or (following.isdigit() and _BEFORE_NUMBER.fullmatch(name)))
