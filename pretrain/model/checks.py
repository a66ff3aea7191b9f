"""Checks of the values of records in this folder."""

import dataclasses
from typing import Any

_KINDS: dict[Any, tuple[type | tuple[type, ...], str]] = {
    int: (int, "a whole number"),
    float: ((int, float), "a finite number"),
    bool: (bool, "true or false"),
}


def check_value(name: str, value: object, condition: bool, accepted: str | tuple[str, ...]) -> None:
    """Raise ValueError unless the condition holds; `accepted` is words, or the accepted values.

    Raises:
        ValueError: names the accepted values.
    """
    if not condition:
        expected = accepted if isinstance(accepted, str) else f"one of {', '.join(accepted)}"
        raise ValueError(f"{name}: {value!r} is not accepted; it must be {expected}")


def check_kinds(record: Any, prefix: str = "") -> None:  # noqa: ANN401 - any dataclass
    """Raise ValueError if a field of a record has another type than declared.

    Raises:
        ValueError: names the first one.
    """
    for field in dataclasses.fields(record):
        if field.type in _KINDS:
            value, (kind, expected) = getattr(record, field.name), _KINDS[field.type]
            fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
            # Neither NaN nor what is infinite in fp32.
            fits = fits and (field.type is not float or abs(value) < 2.0**128)
            check_value(f"{prefix}{field.name}", value, fits, expected)
