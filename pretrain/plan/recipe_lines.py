"""The lines that `recipes` and `show` print, from recipes, settings and their documentation."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal, get_args, get_origin

import yaml

from data_prep.common.arguments import as_invoked
from data_prep.common.records import OneOf, docstrings, keys
from pretrain.checks.recipe import check_settings
from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.config.sections import ADVANCED, ModelRecipe
from pretrain.config.settings import flatten, is_within, to_yaml
from pretrain.model.config import CHOICES, POSITION_METHODS, ModelConfig
from pretrain.model.presets import SIZES, VARIANTS
from pretrain.objectives.registry import SETTINGS_BY_NAME


def show(
    recipe: str, overrides: Sequence[str], *, only_changed: bool, every: bool
) -> Iterator[str]:
    """Return the lines of `show`.

    Args:
        recipe: name or file of a recipe.
        overrides: settings to change.
        only_changed: as the option `--changed`.
        every: as the option `--all`.

    Raises:
        ValueError: a setting is not accepted.
    """
    config = recipes.load(recipe, overrides)
    check_settings(config)
    found = recipes.sources(recipe, overrides)
    if "folder" not in found:  # saved under another name, the recipe has a folder of that name
        config = dataclasses.replace(config, folder="")
    if only_changed:
        return _changed(config, found)
    return _described(config, found, set() if every else _unset(config, found))


def _unset(config: RunConfig, sources: Mapping[str, str]) -> set[str]:
    """Return the advanced settings, and sections of nothing else, that have their defaults."""
    keys = flatten(dataclasses.asdict(config))
    unset = {key for name in ADVANCED for key in keys if is_within(key, name)} - sources.keys()
    shown = {key.partition(".")[0] for key in keys if key not in unset}
    return unset | {key.partition(".")[0] for key in unset} - shown


def _changed(config: RunConfig, sources: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings that differ from their defaults as YAML, with their sources."""
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
        yield from (
            "",
            f"# `{as_invoked('pretrain show')} --all` also prints the advanced settings.",
        )


def _not_overridden(model: ModelRecipe) -> Iterator[str]:
    """Yield the other fields that `model.overrides` may set, with the named model's values."""
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
    key, indent = f"{path}{name}", "  " * path.count(".")
    begin = f"{indent}# "
    yield from textwrap.wrap(text, 100, initial_indent=begin, subsequent_indent=begin)
    if dataclasses.is_dataclass(value):
        yield f"{indent}{name}:"
        yield from _described(value, sources, hidden, f"{key}.")
    elif isinstance(value, dict) and value:  # model.overrides, or of data.corpora
        texts = docstrings(ModelConfig) if name == "overrides" and text else {}
        yield f"{indent}{name}:"
        for below in value:
            yield from _setting(below, value[below], texts.get(below, ""), sources, f"{key}.")
    elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):  # phases
        parts = [{k: v for k, v in dataclasses.asdict(each).items() if v} for each in value]
        yield f"{indent}{name}:  # {sources.get(key, 'default')}"
        yield from to_yaml(parts).splitlines()
    else:
        style = None if isinstance(value, list) else False  # None: the list alone on one line
        line = to_yaml({name: value}, default_flow_style=style, width=sys.maxsize).rstrip()
        yield f"{indent}{line}  # {sources.get(key, 'default')}"


def listing() -> Iterator[str]:
    """Yield the lines of `recipes`."""
    yield "recipes, for show, plan and supervise:"
    for path in sorted(recipes.RECIPES.glob("*.yaml")):
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
    yield "\nother settings that take a name:"
    for key, names in _named_settings().items():
        if key not in tables and key not in ("objective", "objective.name"):
            yield f"  {key:<34} {', '.join(names)}"


def _named_settings() -> dict[str, Sequence[str]]:
    """The settings that accept certain names only, with these."""
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
