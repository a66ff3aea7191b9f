"""A run's recipe: defaults < recipe YAML (`extends:` another) < key=value on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.files import write_atomically
from pretrain.config.run import RunConfig
from pretrain.config.settings import apply_override, build, merge, parse

RECIPES = Path(__file__).parents[1] / "recipes"


def load(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a recipe and `section.key=value` overrides describe.

    Args:
        recipe: a YAML file, or the name of one in pretrain/recipes.
        overrides: such as "optimizer.learning_rate=1e-4".

    Raises:
        ValueError: no such recipe, a key that does not exist (the nearest is named), a value of
            the wrong kind, or values that contradict each other.
    """
    values = _merged(find(recipe))
    for override in overrides:
        apply_override(values, override)
    try:
        return build(RunConfig, values)
    except ValueError as error:
        raise ValueError(f"{_source_of(str(error), recipe, overrides)}: {error}") from error


def _source_of(message: str, recipe: str, overrides: Sequence[str]) -> str:
    """Where the setting was written that `message` is about: a file, or a word.

    The first one that makes `build` say it, in the order in which they are merged.
    """
    values: dict[str, Any] = {}
    for path, delta in _read(find(recipe), seen=()):
        values = merge(values, delta)
        if _complaint(values) == message:
            return recipe if path == find(recipe) else str(path)
    for override in overrides:
        apply_override(values, override)
        if _complaint(values) == message:
            return f"{override!r} on the command line"
    return recipe


def _complaint(values: Mapping[str, Any]) -> str:
    try:
        build(RunConfig, values)
    except ValueError as error:
        return str(error)
    return ""


def find(recipe: str) -> Path:
    """The file of a recipe's name or path.

    Raises:
        ValueError: there is none; the known names are listed.
    """
    for path in (Path(recipe), RECIPES / f"{recipe}.yaml"):
        if path.is_file():
            return path
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    raise ValueError(f"recipe {recipe!r} is neither a file nor one of {', '.join(names)}")


MAY_CHANGE = (
    "training.data_workers",
    "training.activation_checkpointing",
    "training.evaluation_interval",
    "training.evaluation_blocks",
    "training.checkpoint_interval",
    "training.checkpoints_kept",
    "batch.micro_batch_size",
    "data.corpus",
    "spike",
    "supervision",
)
"""What a resumed run may have otherwise than it began: nothing that changes batches, masks or the
gradient (micro-batches key the dropout, so another size draws it anew). The corpus may have moved;
that it is the same is checked by its digest."""


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """What a resumed run must not change but does, as "key: old, now new"."""
    before, after = _flat(dataclasses.asdict(old)), _flat(dataclasses.asdict(new))
    return [
        f"{key}: {before.get(key)!r}, now {after.get(key)!r}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
        and key != "folder"
        and not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result.update(_flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result


def dump(config: RunConfig, path: Path) -> None:
    """Write the merged recipe, complete or not at all, as YAML that `load` reads back."""
    import yaml

    write_atomically(path, yaml.safe_dump(dataclasses.asdict(config), sort_keys=False).encode())


def _merged(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _, delta in _read(path, seen=()):
        values = merge(values, delta)
    return values


def _read(path: Path, seen: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    """A recipe's file after the files that it extends, each with what it says."""
    if path.resolve() in seen:
        raise ValueError(f"{path}: extends itself, by way of {', '.join(map(str, seen))}")
    values = parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds no mapping of keys to values")
    base = values.pop("extends", None)
    if base is None:
        return [(path, values)]
    beside = path.parent / f"{base}.yaml"
    base_path = beside if beside.is_file() else find(str(base))
    return [*_read(base_path, (*seen, path.resolve())), (path, values)]
