"""Parse a line of a `.jsonl` file, or name the reason why it cannot be parsed."""

import json
import re
from collections.abc import Collection
from functools import lru_cache, partial

from data_prep.manifest import Settings

_ESCAPED_KEY = re.compile(rb'\\.[^"\\]*"\s*:')  # its last escape, and what follows


class BadLine(ValueError):
    """A line cannot be parsed; the message is the reason."""


def parse(line: bytes, text_key: str = Settings.text_key) -> object:
    """Return the JSON value of a line.

    Numbers may have any size; those that orjson cannot represent become floats. Of several equal
    keys the last one counts, except for those of the text, about which JSON readers disagree.

    Args:
        line: UTF-8, with or without a line end.
        text_key: Key of the text; dots separate the keys of nested objects.

    Raises:
        BadLine: The line is not JSON or not UTF-8, has a lone surrogate, NaN, or a key of the text
            twice in an object, or is nested too deeply.
    """
    import orjson

    try:
        record: object = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_slowly(line, text_key)
    # orjson silently takes the last of several equal keys; rfind is faster than count.
    is_twice = any(line.find(name) != line.rfind(name) for name in _quoted(text_key))
    if is_twice or _ESCAPED_KEY.search(line):  # "te\u0078t" is the key "text" too
        return _parse_slowly(line, text_key)
    return record


@lru_cache
def _quoted(text_key: str) -> list[bytes]:
    return [json.dumps(name, ensure_ascii=False).encode() for name in _names(text_key)]


def _names(text_key: str) -> set[str]:
    return {text_key, *text_key.split(".")}


def _parse_slowly(line: bytes, text_key: str) -> object:
    """Parse with the standard library, which accepts huge numbers and names what is wrong."""
    try:
        record: object = json.loads(
            line.decode(),
            parse_constant=int,  # refuses NaN and Infinity
            parse_int=float,  # of any length
            object_pairs_hook=partial(_to_record, _names(text_key)),
        )
        json.dumps(record, ensure_ascii=False).encode()
    except BadLine:
        raise
    except UnicodeDecodeError as error:
        raise BadLine("bad-utf8") from error
    except RecursionError as error:
        raise BadLine("nested-too-deeply") from error
    except UnicodeEncodeError as error:
        raise BadLine("lone-surrogate") from error
    except ValueError as error:
        raise BadLine("not-json") from error
    return record


def _to_record(names: Collection[str], pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs) and any(sum(key == name for key, _ in pairs) > 1 for name in names):
        raise BadLine("duplicate-key")
    return record
