"""Settings files: YAML mappings and key=value words to frozen, typed records.

What the two kinds of recipe (pretraining, fine-tuning) share: unknown keys are refused with the
nearest known name, values of the wrong kind with what would be accepted. Imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line whose key=value words (`overrides`) may stand anywhere.

    argparse takes positional words in one row alone.
    """
    options, rest = parser.parse_known_args(arguments)
    strange = [word for word in rest if word.startswith("-") or not hasattr(options, "overrides")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def add_device(command: argparse.ArgumentParser) -> None:
    """Give a command that runs a model its --device (see `distributed.choose_device`)."""
    command.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: a GPU where there is one, else the CPU)"
    )


def check(condition: bool, name: str, value: object, accepted: str) -> None:
    """Refuse the value of setting `name` unless the condition holds.

    Raises:
        ValueError: says what would be accepted.
    """
    if not condition:
        raise ValueError(f"{name}: {value!r} is not accepted; it must be {accepted}")


_RENAMED = {"masking": "objective"}


def unknown_key(where: str, name: str, known: typing.Iterable[str]) -> str:
    """The message for a key that does not exist, with the nearest that does."""
    if where in _RENAMED:
        return f"unknown key {where!r}; it is called {_RENAMED[where]!r} now"
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"unknown key {where!r}; {hint}"


def parse(text: str, source: str) -> Any:  # noqa: ANN401 - YAML is what it is
    """What a YAML text says.

    Raises:
        ValueError: it is no YAML; `source` is named.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: is no YAML: {error}") from error


def merge(base: dict[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `delta` in place of its own, section by section."""
    merged = dict(base)
    for key, value in delta.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, Mapping)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set the key that a word such as "optimizer.learning_rate=1e-4" names, in place.

    Raises:
        ValueError: the word has no "=", or names a key below a value.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ValueError(f"{override!r} is no override; write section.key=value")
    *sections, key = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{override!r}: {section} is a value, not a section")
    values[key] = parse(text, override)


def build(kind: type[T], values: object, prefix: str = "") -> T:
    """The record of a nested mapping; keys left out keep their defaults.

    Args:
        kind: a dataclass, whose fields may be dataclasses.
        values: what a file says.
        prefix: the section's name and a dot, for messages.

    Raises:
        ValueError: an unknown key (the nearest is named), a value of the wrong kind, or what the
            record itself refuses.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{prefix.rstrip('.')}: {values!r} is no section of keys")
    hints = typing.get_type_hints(kind)
    choices = {
        field.name: field.metadata["choices"]
        for field in dataclasses.fields(typing.cast("Any", kind))
        if "choices" in field.metadata
    }
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            raise ValueError(unknown_key(f"{prefix}{name}", str(name), hints))
        if name in choices:
            arguments[name] = _chosen(choices[name], value, f"{prefix}{name}")
        else:
            arguments[name] = _convert(hints[name], value, f"{prefix}{name}")
    return kind(**arguments)


def _chosen(choices: Mapping[str, type[T]], value: object, where: str) -> T:
    """The record of a section whose key `name` picks its type."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {value!r} is no section of keys")
    name = value.get("name", next(iter(choices)))
    check(name in choices, f"{where}.name", name, f"one of {', '.join(choices)}")
    return build(choices[name], {k: v for k, v in value.items() if k != "name"}, f"{where}.")


def _convert(kind: Any, value: object, name: str) -> object:  # noqa: ANN401 - a type or an alias
    if dataclasses.is_dataclass(kind):
        return build(typing.cast("type[object]", kind), value, f"{name}.")
    if isinstance(kind, types.GenericAlias):
        check(isinstance(value, Mapping), name, value, "a mapping")
        return {k: _number(v) for k, v in typing.cast("Mapping[str, Any]", value).items()}
    if kind is float:
        value = _number(value)
        check(
            isinstance(value, int | float) and not isinstance(value, bool), name, value, "a number"
        )
        return float(typing.cast("float", value))
    accepted = {int: "a whole number", str: "text", bool: "true or false"}[kind]
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    check(fits, name, value, accepted)
    return value


def _number(value: object) -> object:
    """YAML 1.1 takes 6e-4 for text; we take it for the number it is."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
