"""Parse a line of a `.jsonl` file, or name the reason why it cannot be parsed."""

import json


class BadLine(ValueError):
    """A line cannot be parsed; the message is the reason."""


_REASONS: dict[type[Exception], str] = {
    UnicodeDecodeError: "bad-utf8",
    UnicodeEncodeError: "lone-surrogate",
    RecursionError: "nested-too-deeply",
}


def parse(line: bytes) -> object:
    """Return the JSON value of a line.

    Numbers may have any size; those that orjson cannot represent become floats. Of several equal
    keys the last one counts, as in other readers of JSON.

    Args:
        line: UTF-8, with or without a line end.

    Raises:
        BadLine: The line is not JSON or not UTF-8, has a lone surrogate or NaN, or is nested too
            deeply.
    """
    import orjson

    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    # The standard library accepts huge numbers, and its errors say what is wrong.
    try:
        # The function int refuses NaN and Infinity; float accepts numbers of any length.
        record: object = json.loads(line.decode(), parse_constant=int, parse_int=float)
        json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadLine(_REASONS.get(type(error), "not-json")) from error
    return record
