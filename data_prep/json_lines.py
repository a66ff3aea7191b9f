"""Parse a line of a `.jsonl` file, or name the reason why it cannot be parsed."""

import json
from typing import NoReturn

_TEXT_KEY = b'"text"'


class BadLine(ValueError):
    """A line cannot be parsed; the message is the reason."""


def parse(line: bytes | None) -> object:
    """Return the JSON value of a line; None stands for a line that was too large to read.

    Numbers may have any size; those that orjson cannot represent become floats. Of several equal
    keys the last one counts, except for "text", about which JSON readers disagree.

    Raises:
        BadLine: The line is not JSON or not UTF-8, has a lone surrogate, NaN, or "text" twice in an
            object, or is nested too deeply.
    """
    import orjson

    if line is None:
        raise BadLine("too-large")
    try:
        record: object = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_slowly(line)
    # orjson silently takes the last of several "text" keys; rfind is faster than count.
    has_several = line.find(_TEXT_KEY) != line.rfind(_TEXT_KEY)
    return _parse_slowly(line) if has_several else record


def _parse_slowly(line: bytes) -> object:
    """Parse with the standard library, which accepts huge numbers and names what is wrong."""
    try:
        record: object = json.loads(
            line.decode(),
            parse_constant=_refuse_constant,
            parse_int=float,  # of any length
            object_pairs_hook=_refuse_second_text,
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_second_text(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if sum(key == "text" for key, _ in pairs) > 1:
        raise BadLine("duplicate-key")
    return dict(pairs)
