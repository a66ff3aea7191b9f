"""The commands about recipes: `recipes` lists them, `show` prints one with all its settings."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from data_prep.common.arguments import typed
from pretrain.config.settings import add_recipe

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.config.sections import ModelRecipe


def add_recipes_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `recipes`: none."""


def recipes(options: argparse.Namespace) -> None:  # noqa: ARG001
    """List recipes, and the names that their settings may have.

    example: python -m pretrain recipes
    """
    sys.stdout.write("".join(f"{line}\n" for line in _listing()))


def add_show_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `show`."""
    add_recipe(command)
    amount = command.add_mutually_exclusive_group()
    changed = "print only settings that differ from their defaults, without documentation"
    amount.add_argument("--changed", action="store_true", help=changed)
    every = "also print advanced settings that have their defaults, and all fields of the model"
    amount.add_argument("--all", action="store_true", help=every)


def show(options: argparse.Namespace) -> None:
    """Print the settings of a run, with their documentation and where their values come from.

    What is printed is a recipe of the same run; without a folder of its own, it runs in the folder
    of the name that you save it under. Fields of the model that its size and variant decide are
    comments.

    example: python -m pretrain show pile-large model.variant=zero-clap --changed
    """
    from pretrain.checks.recipe import check_settings
    from pretrain.config.load import load, sources

    config = load(options.recipe, options.overrides)
    check_settings(config)
    found = sources(options.recipe, options.overrides)
    if "folder" not in found:  # saved under another name, the recipe has a folder of that name
        config = dataclasses.replace(config, folder="")
    hidden = set() if options.all else _unset(config, found)
    lines = _changed(config, found) if options.changed else _described(config, found, hidden)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _unset(config: RunConfig, sources: Mapping[str, str]) -> set[str]:
    """Return the advanced settings, and sections of nothing else, that have their defaults."""
    from pretrain.config.sections import ADVANCED
    from pretrain.config.settings import flatten, is_within

    keys = flatten(dataclasses.asdict(config))
    unset = {key for name in ADVANCED for key in keys if is_within(key, name)} - sources.keys()
    shown = {key.partition(".")[0] for key in keys if key not in unset}
    return unset | {key.partition(".")[0] for key in unset} - shown


def _changed(config: RunConfig, sources: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings that differ from their defaults as YAML, with their sources."""
    from pretrain.config.run import RunConfig

    defaults = dataclasses.asdict(RunConfig(objective=type(config.objective)()))
    defaults["objective"]["name"] = RunConfig().objective.name
    found = _differing(dataclasses.asdict(config), defaults)
    for section, values in found.items():
        shown = config.phases if section == "phases" else values
        yield from _setting(section, shown, "", sources, "")
    if not found:
        yield "{}"


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of nested values that differs."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            if below := _differing(value, default):
                found[name] = below
        elif value != default:
            found[name] = value
    return found


def _described(
    record: Any,  # noqa: ANN401 - any dataclass
    sources: Mapping[str, str],
    hidden: Set[str],
    path: str = "",
) -> Iterator[str]:
    """Yield the fields of a dataclass that are not hidden as YAML, with comments."""
    from data_prep.common.records import docstrings

    texts = docstrings(type(record))
    for field in dataclasses.fields(record):
        if f"{path}{field.name}" in hidden:
            continue
        value = getattr(record, field.name)
        text = texts.get(field.name, "")
        if dataclasses.is_dataclass(value):
            text = (inspect.getdoc(type(value)) or "").partition("\n")[0]
            yield ""
        yield from _setting(field.name, value, text, sources, path, hidden)
        if (path, field.name) == ("model.", "overrides") and not hidden:
            yield from _not_overridden(record)
    if hidden and not path:
        yield from ("", f"# `{typed('pretrain show')} --all` has the advanced settings too.")


def _not_overridden(model: ModelRecipe) -> Iterator[str]:
    """Yield the other fields that `model.overrides` may set, with the named model's values."""
    import yaml

    from data_prep.common.records import docstrings
    from pretrain.model.config import ModelConfig
    from pretrain.model.presets import SIZES, VARIANTS

    texts, begin = docstrings(ModelConfig), "    # "
    named = {f"size {model.size}": SIZES, f"variant {model.variant}": VARIANTS}
    for field in dataclasses.fields(ModelConfig):
        if field.name in {"vocab_size", "pair_head", *model.overrides}:
            continue
        value, source = field.default, "default"
        for origin, table in named.items():
            delta = table[origin.partition(" ")[2]]
            if field.name in delta:
                value, source = delta[field.name], origin
        yield from textwrap.wrap(
            texts[field.name], 100, initial_indent=begin, subsequent_indent=begin
        )
        line = yaml.safe_dump({field.name: value}).rstrip()
        yield f"    #{line}  # {source}"


def _setting(
    name: str,
    value: Any,  # noqa: ANN401 - any setting's
    text: str,
    sources: Mapping[str, str],
    path: str,
    hidden: Set[str] = frozenset(),
) -> Iterator[str]:
    from pretrain.config.settings import to_yaml

    key, indent = f"{path}{name}", "  " * path.count(".")
    begin = f"{indent}# "
    yield from textwrap.wrap(text, 100, initial_indent=begin, subsequent_indent=begin)
    if dataclasses.is_dataclass(value):
        yield f"{indent}{name}:"
        yield from _described(value, sources, hidden, f"{key}.")
    elif isinstance(value, dict) and value:  # model.overrides, or of data.corpora
        from data_prep.common.records import docstrings
        from pretrain.model.config import ModelConfig

        texts = docstrings(ModelConfig) if name == "overrides" and text else {}
        yield f"{indent}{name}:"
        for below in value:
            yield from _setting(below, value[below], texts.get(below, ""), sources, f"{key}.")
    elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):  # phases
        parts = [{k: v for k, v in dataclasses.asdict(each).items() if v} for each in value]
        yield f"{indent}{name}:  # {sources.get(key, 'default')}"
        yield from to_yaml(parts).splitlines()
    elif isinstance(value, list):
        line = to_yaml(value, default_flow_style=True, width=sys.maxsize).rstrip()
        yield f"{indent}{name}: {line}  # {sources.get(key, 'default')}"
    else:
        line = to_yaml({name: value}, default_flow_style=False, width=sys.maxsize).rstrip()
        yield f"{indent}{line}  # {sources.get(key, 'default')}"


def _listing() -> Iterator[str]:
    from pretrain.config.load import RECIPES
    from pretrain.model.presets import SIZES, VARIANTS
    from pretrain.objectives.registry import SETTINGS_BY_NAME

    yield "recipes, for show, plan and supervise:"
    for path in sorted(RECIPES.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        yield f"  {path.stem:<34} {first.removeprefix('#').strip()}"
    tables = {"model.size": SIZES, "model.variant": VARIANTS}
    for key, table in tables.items():
        yield f"\n{key}:"
        for name, delta in table.items():
            changes = ", ".join(f"{field} {value}" for field, value in delta.items())
            yield f"  {name:<34} {changes or 'the defaults of ModelConfig'}"
    yield "\nobjective.name:"
    for name, settings in SETTINGS_BY_NAME.items():
        yield f"  {name:<34} {(inspect.getdoc(settings) or '').partition(chr(10))[0]}"
    yield "\nother settings with names:"
    for key, names in _named_settings().items():
        if key not in tables and key not in ("objective", "objective.name"):
            yield f"  {key:<34} {', '.join(names)}"


def _named_settings() -> dict[str, Sequence[str]]:
    """The settings that accept certain names only, with these."""
    from data_prep.common.records import OneOf, keys
    from pretrain.config.run import RunConfig
    from pretrain.model.config import CHOICES, POSITION_METHODS
    from pretrain.objectives.registry import SETTINGS_BY_NAME

    found: dict[str, Sequence[str]] = {}
    for objective in SETTINGS_BY_NAME:
        for key, annotation in keys(RunConfig, {"objective": {"name": objective}}):
            if get_origin(annotation) is Literal:
                found[key] = [str(n).lower() for n in get_args(annotation)]
            for mark in getattr(annotation, "__metadata__", ()):
                if isinstance(mark, OneOf):
                    found[key] = [*mark.table]
    for name, names in {"position": POSITION_METHODS, **CHOICES}.items():
        found[f"model.overrides.{name}"] = [*names]
    return found


COMMANDS = {"recipes": (add_recipes_arguments, recipes), "show": (add_show_arguments, show)}
