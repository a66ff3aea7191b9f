"""Encode texts with gigatoken where it gives the same ids as the reference, the tokenizers library.

gigatoken is more than twenty times as fast as the reference, and young. Its version is therefore
pinned, its own file readers are not used, and each new encoder must give the ids of the reference
for `DIFFICULT_TEXTS` and for samples of the first documents. If it does not, or is not installed,
the reference is used.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]
Encode = Callable[[Sequence[str]], list[Ids]]

DIFFICULT_TEXTS = (
    "",
    " ",
    "a",
    "<s> <pad></s><unk> <mask> <mask><|endoftext|>",
    "I'm we'll they'Ve it'S don't''s 'tis \u2019s can''t 're",
    "  two  spaces, \ttabs\t\t and\r\n\r\nlines \n\n\n  indented\n ",
    "trailing space ",
    "\x00\x01\x7f\x80\x85\xa0\xad \x1b[0m \ufeff \u2028 \u3000 \u200b\u200d \ufffe\uffff",
    "x1 2y 3.14 1,000,000 \xbd \xb2 \u0663\u0664 \u2167 \u096b \u4e00\u4e8c \U0001d7d8 1st",
    "na\xefve caf\xe9 cafe\u0301 e\u0301\u0301\u0327 \u212b \ufb01 \u01c6 \xdf \u0130i \u0131I",
    "\u65e5\u672c\u8a9e\u3002 \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d",
    "\u0639\u0631\u0628\u064a \u202e\u05e2\u05d1\u05e8\u05d9\u05ea\u202c",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f \U0001f1e8\U0001f1ed",
    "\U0001f9ff\U000e0041 \U0010ffff \U00020000 \U00010348 \U0001d54f \ue000",
    "_under_score __init__ a.b->c[0] != {x: 'y'} // #1 @me $5 50% http://a.b/?q=%20&r#s",
    "ACGT" * 300,
    "a" * 2000,
    " " * 300 + "x" + "\n" * 300,
    "\xe9" * 500 + "!?" * 500 + "0" * 500,
)
_PLAIN_BPE = ("type", "vocab", "merges")
_SAMPLE_DOCUMENTS = 256
_SAMPLE_CHARACTERS = 400  # of each document; the reference takes about 40 ms for all
# gigatoken 0.10 caches every word without a limit, in a table that doubles. After this growth
# another doubling would not fit into a worker of 400 MB.
_GROWTH_BYTES = 128 << 20


class Encoder:
    """Encodes batches of texts with gigatoken if possible, else with the reference.

    If gigatoken was expected to work and does not, the reason is printed to stderr once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build an encoder, which takes about 0.2 s for 50,000 ids."""
        self._reference = tokenizer.encode_batch
        self._fast: Encode | None = None
        self._is_checked = False
        content = tokenizer.content()
        if _is_byte_level_bpe(content):
            try:
                self._fast = _Gigatoken(content).encode
            except Exception as error:  # ImportError, or any error about the vocabulary
                self._fall_back(f"gigatoken cannot be used ({type(error).__name__}: {error})")

    @property
    def name(self) -> str:
        """Library and version, such as "gigatoken 0.10.0"; final after the first batch."""
        library = "gigatoken" if self._fast else "tokenizers"
        return f"{library} {version(library)}"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without special tokens, as `Tokenizer.encode_batch` does.

        The first call compares gigatoken with the reference on samples of its texts, and on
        `DIFFICULT_TEXTS`.
        """
        if self._fast and texts and not self._is_checked:
            samples = [text[:_SAMPLE_CHARACTERS] for text in texts[:_SAMPLE_DOCUMENTS]]
            self._check(self._fast, [*DIFFICULT_TEXTS, *samples])
        return (self._fast or self._reference)(texts)

    def _check(self, fast: Encode, texts: Sequence[str]) -> None:
        """Fall back to the reference if the ids differ from its own."""
        self._is_checked = True
        for text, found, expected in zip(texts, fast(texts), self._reference(texts), strict=True):
            if not np.array_equal(found, expected):
                self._fall_back(f"{self.name} gives other ids for {text[:80]!r}")
                return

    def _fall_back(self, reason: str) -> None:
        self._fast = None
        _say(f"{reason}: encoding with {self.name}, which is slow")


def _is_byte_level_bpe(content: dict[str, Any]) -> bool:
    """Return whether a `tokenizer.json` is a plain, complete byte-level BPE like GPT-2's."""
    from tokenizers import pre_tokenizers

    model, splitter = content["model"], content["pre_tokenizer"] or {}
    return (
        model["type"] == "BPE"
        # No dropout, prefixes, unknown token, or options of later versions.
        and not any(value for name, value in model.items() if name not in _PLAIN_BPE)
        and content["normalizer"] is None
        and splitter.get("type") == "ByteLevel"
        and splitter["use_regex"]
        and not splitter["add_prefix_space"]
        and all(token["special"] for token in content["added_tokens"])
        and model["vocab"].keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    )


class _Gigatoken:
    """gigatoken's encoder, rebuilt when its cache has grown too large."""

    def __init__(self, content: dict[str, Any]) -> None:
        import psutil

        self._json = _for_gigatoken(content)
        self._memory = psutil.Process().memory_info
        self._build()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._memory().rss > self._limit_bytes:
            del self._encode  # free its memory first
            self._build()
        # As fast as its batch method, which would import awkward (0.5 s, 65 MB).
        encode = self._encode
        return [encode(text).view(np.int32) for text in texts]

    def _build(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._encode: Callable[[str], npt.NDArray[np.uint32]] = load_hf_json(self._json).encode
        self._limit_bytes = self._memory().rss + _GROWTH_BYTES


def _for_gigatoken(content: dict[str, Any]) -> bytes:
    """Return a `tokenizer.json` with which gigatoken gives the ids of the reference."""
    import orjson
    from tokenizers import pre_tokenizers

    model = content["model"]
    # gigatoken would match special and filler tokens in a text, or use them for a token with the
    # same bytes. So only bytes and products of merges are left in the vocabulary.
    reachable = {
        *pre_tokenizers.ByteLevel.alphabet(),
        *(left + right for left, right in model["merges"]),
    }
    vocab = {token: id for token, id in model["vocab"].items() if token in reachable}
    return orjson.dumps({**content, "added_tokens": [], "model": {**model, "vocab": vocab}})


@cache
def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
