"""How many times longer a `tokenizer.json` may make a text: limited before the file is used.

Twenty replacements of "a" by "aa" in a row make a million of each, in a file of 2 KB. The library
applies them as soon as it reads the file, to the added tokens.
"""

import base64
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST = 4096
"""ALBERT's normalizers and splitters reach about 1500, most others less than 200."""
MOST_ADDED = 1 << 22
"""Bytes of all added tokens after the normalizer: the library takes about 75 times as many."""
_NORMALIZERS: Mapping[str, int] = {
    # In bytes: U+FDFA becomes 18 letters, a single letter with marks up to three times as many.
    **{"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "BertNormalizer": 6, "Lowercase": 2},
    **{"ByteLevel": 2, "Nmt": 1, "Strip": 1, "StripAccents": 1, "Sequence": 1},
}
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")


def refuse_growth(content: Mapping[str, Any]) -> None:
    """Check the content of a `tokenizer.json`.

    Raises:
        ValueError: It may make a text more than `MOST` times as long, or its added tokens longer
            than `MOST_ADDED`, or has a normalizer that is not known here.
    """
    try:
        normalizers = [*_parts(content.get("normalizer"))]
        others = ("pre_tokenizer", "post_processor", "decoder")
        parts = [part for name in others for part in _parts(content.get(name))]
        factors = [_of_normalizer(part) for part in normalizers] + [_of(part) for part in parts]
        tokens = content.get("added_tokens") or ()
        added = sum(len(token["content"].encode()) for token in tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a normalizer, splitter or added token is damaged: {error!r}") from None
    if None in factors:
        unknown = normalizers[factors.index(None)]
        raise ValueError(
            f"normalizer {str(unknown.get('type'))[:40]!r}; accepted: Replace, Precompiled, "
            f"Prepend, {', '.join(_NORMALIZERS)}"
        )
    if _product(factors) > MOST:
        raise ValueError(
            f"it may make a text more than {MOST:,} times as long; accepted: up to {MOST:,} times"
        )
    if (added := _product(factors[: len(normalizers)]) * added) > MOST_ADDED:
        raise ValueError(
            f"its added tokens may take {added:,} bytes; accepted: up to {MOST_ADDED:,}"
        )


def _product(factors: Iterable[int | None]) -> int:
    """Return the product up to `MOST`; above, a larger number."""
    return functools.reduce(lambda x, factor: min(x * (factor or 1), MOST + 1), factors, 1)


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a part and those in its lists, whatever their depth."""
    waiting = [part] if part else []
    while waiting:
        yield (part := waiting.pop())
        waiting += [inner for name in _LISTS for inner in part.get(name) or ()]


def _of_normalizer(part: dict[str, Any]) -> int | None:
    """Bound on the growth of a text in bytes; None where the normalizer is not known."""
    if part.get("type") == "Precompiled":
        return _of_table(base64.b64decode(part["precompiled_charsmap"]))
    if part.get("type") == "Prepend":
        return 1 + len(part["prepend"].encode())
    return _of(part) if part.get("type") == "Replace" else _NORMALIZERS.get(str(part.get("type")))


def _of(part: dict[str, Any]) -> int:
    """The same of a splitter, processor or decoder; most of them add nothing, or once."""
    if part.get("type") == "Replace":
        pattern, size = part["pattern"].get("String"), len(part["content"].encode())
        # A regular expression may match between any two characters.
        return max(1, math.ceil(size / len(pattern.encode()))) if pattern else 1 + size
    if part.get("type") == "TemplateProcessing":
        return max(1, sum("Sequence" in piece for piece in part["single"]))
    return 2 if part.get("type") == "ByteLevel" else 1


def _of_table(table: bytes) -> int:
    """The longest text of SentencePiece's table: size of its index, index, and texts."""
    start = 4 + int.from_bytes(table[:4], "little")
    return max(1, *map(len, table[start:].split(b"\0")))
