"""A line of a `.jsonl` file -> what it says, or the reason why it says nothing."""

import json
from typing import NoReturn

_TEXT_KEY = b'"text"'


class BadLine(ValueError):
    """A line that cannot be parsed; its message is the reason."""


def parse(line: bytes | None) -> object:
    """The value that a line holds; None stands for one that is too large to be held.

    Numbers may be of any size, and come out as floats where orjson has no room for them. Of several
    equal keys the last counts, but for "text": readers disagree on which one does.

    Raises:
        BadLine: It is not JSON, not UTF-8, has a lone surrogate, NaN, "text" twice in an object, or
            is nested too deeply.
    """
    import orjson

    if line is None:
        raise BadLine("too-large")
    try:
        record: object = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_slowly(line)
    # orjson takes the last of several keys "text" without a word; rfind is quicker than a count.
    is_doubtful = line.find(_TEXT_KEY) != line.rfind(_TEXT_KEY)
    return _parse_slowly(line) if is_doubtful else record


def _parse_slowly(line: bytes) -> object:
    """Name the reason why orjson refused, or save what is JSON after all (huge numbers)."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise BadLine("bad-utf8") from error
    try:
        record: object = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_int=float,  # of any length
            object_pairs_hook=_refuse_second_text,
        )
        json.dumps(record, ensure_ascii=False).encode()
    except BadLine:
        raise
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
