"""Load recipes: defaults < recipe YAML (which may extend another) < key=value overrides."""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from data_prep.common.files import check_format, named_errors, strict_json, write_atomically
from data_prep.common.records import decode
from data_prep.common.wording import changes
from pretrain.config.changes import FIXED, FREE, rule
from pretrain.config.run import RunConfig
from pretrain.config.settings import apply_override, flatten, merge, named_file, parse, to_yaml

FORMAT_VERSION = 1
"""Of the recipes that the project writes: a run's, and those in checkpoints."""
RECIPES = Path(__file__).parents[1] / "recipes"
RUN_FILE = "run.yaml"
"""Name of the merged recipe in a run's folder."""
_PUBLIC = (
    *("format_version", "data", "model", "objective", "batch", "optimizer", "schedule"),
    *("training", "spike", "fault", "phases"),
)
"""What decides the weights. The rest names people, machines and programs."""
_PATHS = ("corpus", "path", "init_from", "deepspeed")
"""Keys of these sections, and of those in them, that may hold a path."""
_PLACES = ("corpus", "path")
"""Keys that say where a corpus is. Corpora are compared by what is in them."""


def load(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the run that a recipe and `section.key=value` overrides describe.

    A recipe that names no folder gets one with its own name, in runs/.

    Args:
        recipe: a YAML file, or the name of one in pretrain/recipes.
        overrides: such as "optimizer.learning_rate=1e-4".

    Raises:
        ValueError: no such recipe, a key that does not exist (the nearest is named), a value of the
            wrong type, or values that contradict each other; names the recipe and the overrides.
    """
    values, _ = _merged(recipe, overrides)
    if values.setdefault("folder", "") == "":
        values["folder"] = f"runs/{find(recipe).stem}"
    with named_errors(" ".join([recipe, *overrides])):
        return decode(RunConfig, values)


def sources(recipe: str, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return what set each key of a run: a recipe's file or an override.

    Keys that are not in the result have their default.
    """
    values, found = _merged(recipe, overrides)
    # An override of a whole section removes what recipes set in it.
    return {key: source for key, source in found.items() if key in flatten(values)}


def _merged(recipe: str, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a run, and what set each key last."""
    values: dict[str, Any] = {}
    found: dict[str, str] = {}
    for path, delta in _read(find(recipe)):
        values = merge(values, delta)
        source = path.name if path.parent == RECIPES else str(path)
        found |= dict.fromkeys(flatten(delta), source)
    for override in overrides:
        apply_override(values, override)
        delta = {}
        apply_override(delta, override)
        found |= dict.fromkeys(flatten(delta), "command line")
    return values, found


def find(recipe: str) -> Path:
    """Return the file of a recipe's name or path.

    Raises:
        ValueError: there is none; the known names are listed.
    """
    if (own := Path(recipe, RUN_FILE)).is_file():
        raise ValueError(f"recipe {recipe!r}: is a run's folder; its recipe is {own}")
    return named_file("recipe", recipe, RECIPES, ".yaml")


def deciding(config: RunConfig, named: bool = False) -> dict[str, Any]:
    """The settings that decide the weights, by dotted key.

    Args:
        config: the recipe.
        named: whether a corpus has the last name of its path, or "" wherever it is.
    """

    def name_of(path: str) -> str:
        return Path(path).absolute().name if named else ""

    values = flatten(_with_paths(dataclasses.asdict(config), _PLACES, name_of))
    return {key: value for key, value in values.items() if rule(key) not in FREE}


def digest(config: RunConfig, corpora: Sequence[str]) -> str:
    """Name a recipe by what decides the weights: 12 hexadecimal digits of a sha256.

    Args:
        config: the recipe.
        corpora: digests of the corpora's manifests.
    """
    values = {**deciding(config), "corpora": list(corpora)}
    return hashlib.sha256(strict_json(values).encode()).hexdigest()[:12]


def differences(old: RunConfig, new: RunConfig, named: bool = False) -> tuple[list[str], list[str]]:
    """How a recipe differs from the one before in what decides the weights.

    Args:
        old: the recipe before.
        new: the recipe.
        named: whether corpora with other names are a difference: for a reader, who is to see it.

    Returns:
        Sentences on what may change from a step on, and on what may not change.
    """
    before, after = deciding(old, named), deciding(new, named)
    may, may_not = [], []
    for key, was, now in sorted(changes(before, after), key=lambda each: each[0]):
        if key == "model.init_from" and Path(was) == Path(now):
            continue  # `models/a/` is `models/a`
        text, reason = f"{key}: {was!r}, now {now!r}", FIXED.get(rule(key))
        if reason:
            may_not.append(f"{text} ({reason})")
        else:
            may.append(text)
    return may, may_not


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Return a recipe as it is written to files, with its format version."""
    return {"format_version": FORMAT_VERSION, **dataclasses.asdict(config)}


def public(config: RunConfig) -> dict[str, Any]:
    """Return what may leave a run's folder of its recipe, which is what decides the weights.

    Of each path only the last name is left. `load` reads the result as YAML.
    """
    values = to_dict(config)
    public = {name: values[name] for name in _PUBLIC}
    return dict(_with_paths(public, _PATHS, lambda path: Path(path).absolute().name))


def _with_paths(value: Any, keys: Collection[str], change: Callable[[str], str]) -> Any:  # noqa: ANN401 - any value of a recipe
    """A value with other paths: the texts at these keys, at any depth, that are not empty."""
    if isinstance(value, list):
        return [_with_paths(each, keys, change) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: change(each)
        if each and isinstance(each, str) and key in keys
        else _with_paths(each, keys, change)
        for key, each in value.items()
    }


def dump(config: RunConfig, path: Path) -> None:
    """Write the merged recipe, complete or not at all, as YAML that `load` reads back."""
    write_atomically(path, to_yaml(to_dict(config)).encode())


def _read(path: Path, extending: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """Read a recipe and the recipes that it extends, base first: each file with its own values."""
    if path.resolve() in extending:
        raise ValueError(f"{path}: extends itself, through {', '.join(map(str, extending))}")
    with named_errors(f"{path}: is not UTF-8"):
        text = path.read_text(encoding="utf-8")
    values = parse(text, str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: does not hold a mapping of keys to values")
    check_format(values.pop("format_version", FORMAT_VERSION), FORMAT_VERSION, path)
    base = values.pop("extends", None)
    if base is None:
        return [(path, values)]
    beside = path.parent / f"{base}.yaml"
    base_path = beside if beside.is_file() else find(str(base))
    return [*_read(base_path, (*extending, path.resolve())), (path, values)]
