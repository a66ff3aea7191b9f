"""Recipes of earlier versions: renamed keys, and the format of recipes that the project writes.

A run's run.yaml and the recipe in a checkpoint's manifest are written by the project; they carry
`format_version` (absent: 1) and are upgraded when they are read. In what a user writes, an old key
is refused with its new name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_prep.records import check_format

FORMAT_VERSION = 3
RENAMED: dict[str, str] = {
    "masking": "objective",
    "training.ranks": "supervision.processes_per_node",
}
"""Keys and sections of format 1 by the name that they have now."""
_ADDED: dict[str, dict[str, object]] = {
    "objective": {"name": "masked-lm"},
    "data": {"packing": "best-fit", "minimum_share_of_tokens": 0.0},
}
"""Values of earlier formats' sections where they do not state them."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their dotted keys."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flatten(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def is_within(key: str, section: str) -> bool:
    """Whether a dotted key is the section or a key below it."""
    return f"{key}.".startswith(f"{section}.")


def refuse_renamed(values: Mapping[str, Any]) -> None:
    """Refuse old keys in a recipe that a user wrote.

    Raises:
        ValueError: a key that was renamed; says its new name.
    """
    for key in flatten(values):
        if (new := _new_name(key)) != key:
            raise ValueError(f"unknown key {key!r}; it is now {new!r}")


def upgrade(recipe: Mapping[str, Any], source: object = "recipe") -> dict[str, Any]:
    """Return a recipe that the project wrote, in this version's keys and without its version.

    Args:
        recipe: with `format_version`, or of format 1; it is not changed.
        source: file that it is from, for messages.

    Raises:
        ValueError: a later version of the project wrote it.
    """
    values = dict(recipe)
    version = values.pop("format_version", 1)
    check_format(version, FORMAT_VERSION, source)
    if version == FORMAT_VERSION:
        return values
    upgraded: dict[str, Any] = {}
    for key, value in flatten(values).items():
        *sections, name = _new_name(key).split(".")
        section = upgraded
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    for name, added in _ADDED.items():
        if name in upgraded:
            upgraded[name] = {**added, **upgraded[name]}
    return upgraded


def _new_name(key: str) -> str:
    for old, new in RENAMED.items():
        if is_within(key, old):
            return new + key[len(old) :]
    return key
