"""Numbers and differences as messages and tables show them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose values differ, with both values; None stands for a missing one."""
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key), after.get(key)
        if was != now:
            yield key, was, now


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def few(values: Iterable[object], most: int = 8, comma: str = ", ") -> str:
    """The values with commas; of more than `most`, the first ones and the number of the others."""
    texts = [str(value) for value in values]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return comma.join(texts[:most]) + more


def in_short(number: float) -> str:
    """A number with three digits and a unit prefix, such as "1.25 M"."""
    number = float(f"{number:.3g}")  # rounded first: 999,600 is 1 M, and not 1e+03 k
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
