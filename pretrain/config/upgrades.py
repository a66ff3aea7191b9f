"""Recipes of earlier versions: renamed keys, and the format of recipes that the project writes.

A run's run.yaml and the recipe in a checkpoint's manifest are written by the project; they carry
`format_version` (absent: 1) and are upgraded when they are read. In what a user writes, an old key
is refused with its new name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from data_prep.records import check_format
from pretrain.config.settings import merge

FORMAT_VERSION = 2
RENAMED: dict[str, str] = {
    "masking": "objective",
    "training.ranks": "supervision.processes_per_node",
}
"""Keys and sections of format 1 by the name that they have now."""
_ADDED: dict[str, dict[str, object]] = {"objective": {"name": "masked-lm"}}
"""What a renamed section of format 1 did not have to say."""


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
        for old, new in RENAMED.items():
            if is_within(key, old):
                raise ValueError(f"unknown key {key!r}; it is now {new + key[len(old) :]!r}")


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
    if version == 1:
        for old, new in RENAMED.items():
            values = _moved(values, old.split("."), new.split("."))
    return values


def _moved(values: dict[str, Any], old: list[str], new: list[str]) -> dict[str, Any]:
    """Return nested `values` with what stands at the path `old`, if anything, at the path `new`."""
    parents = [values]
    for key in old[:-1]:
        parents.append(parents[-1].get(key, {}))
    if old[-1] not in parents[-1]:
        return values
    moved = parents[-1][old[-1]]
    remaining: Any = {key: value for key, value in parents[-1].items() if key != old[-1]}
    for parent, key in zip(parents[-2::-1], old[-2::-1], strict=True):
        remaining = {**parent, key: remaining}
    if isinstance(moved, Mapping):
        moved = {**_ADDED.get(".".join(new), {}), **moved}
    nested = functools.reduce(lambda below, key: {key: below}, reversed(new), moved)
    return merge(remaining, nested)
