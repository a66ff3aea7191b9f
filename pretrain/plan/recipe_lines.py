"""The lines that `recipes` and `show` print, from recipes, settings and their documentation."""

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal, get_args, get_origin

import yaml

from data_prep.common.records import OneOf, docstrings, keys
from pretrain.checks.recipe import check_settings
from pretrain.config import load as recipes
from pretrain.config.run import RunConfig
from pretrain.config.sections import ADVANCED, OVERRIDABLE
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
    values = dataclasses.asdict(config)
    if only_changed:
        defaults = dataclasses.asdict(RunConfig(objective=type(config.objective)()))
        defaults["objective"]["name"] = RunConfig().objective.name
        return _lines(values, found, left_out=defaults) if values != defaults else iter(["{}"])
    hidden = set() if every else _unset(config, found)
    return _lines(values, found, _texts(config), hidden)


def _unset(config: RunConfig, sources: Mapping[str, str]) -> set[str]:
    """Return the advanced settings, and sections of nothing else, that have their defaults."""
    keys = flatten(dataclasses.asdict(config))
    unset = {key for name in ADVANCED for key in keys if is_within(key, name)} - sources.keys()
    shown = {key.partition(".")[0] for key in keys if key not in unset}
    return unset | {key.partition(".")[0] for key in unset} - shown


def _texts(
    record: Any,  # noqa: ANN401 - any dataclass
    path: str = "",
) -> dict[str, str]:
    """Return the documentation of the fields of a dataclass, and of those in it, by their keys."""
    found = {f"{path}{name}": text for name, text in docstrings(type(record)).items()}
    for field in dataclasses.fields(record):
        key, value = f"{path}{field.name}", getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            first = (inspect.getdoc(type(value)) or "").partition("\n")[0]
            found |= _texts(value, f"{key}.") | {key: first}
        elif key == "data.corpora":
            for corpus in value:
                found |= _texts(value[corpus], f"{key}.{corpus}.")
        elif key == "model.overrides":
            found |= {f"{key}.{name}": text for name, text in docstrings(ModelConfig).items()}
    return found


def _not_overridden(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield the other fields that `model.overrides` may set, with the named model's values."""
    texts, begin = docstrings(ModelConfig), "    # "
    tables: dict[str, Mapping[str, Any]] = {
        "default": {field.name: field.default for field in dataclasses.fields(ModelConfig)},
        f"size {model['size']}": SIZES[model["size"]],
        f"variant {model['variant']}": VARIANTS[model["variant"]],
    }
    sources = {name: source for source, table in tables.items() for name in table}
    for name in (name for name in OVERRIDABLE if name not in model["overrides"]):
        yield from textwrap.wrap(texts[name], 100, initial_indent=begin, subsequent_indent=begin)
        line = yaml.safe_dump({name: tables[sources[name]][name]}).rstrip()
        yield f"    #{line}  # {sources[name]}"


def _lines(
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    texts: Mapping[str, str] = {},
    hidden: Set[str] = frozenset(),
    left_out: Mapping[str, Any] = {},
    path: str = "",
) -> Iterator[str]:
    """Yield settings as YAML, with their texts and sources as comments.

    Those whose keys are hidden, or whose values `left_out` has as well, are left out.
    """
    indent = "  " * path.count(".")
    begin = f"{indent}# "
    for name, value in values.items():
        key, source = f"{path}{name}", sources.get(f"{path}{name}", "default")
        if key in hidden or (name in left_out and left_out[name] == value):
            continue
        if texts and not path and isinstance(value, dict):
            yield ""
        text = texts.get(key, "")
        yield from textwrap.wrap(text, 100, initial_indent=begin, subsequent_indent=begin)
        if isinstance(value, dict) and value:
            yield indent + to_yaml({name: None}).removesuffix(" null\n")
            yield from _lines(value, sources, texts, hidden, left_out.get(name, {}), f"{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):  # phases
            yield f"{indent}{name}:  # {source}"
            yield from to_yaml(
                [{k: v for k, v in each.items() if v} for each in value]
            ).splitlines()
        else:
            style = None if isinstance(value, list) else False  # None: the list alone on one line
            line = to_yaml({name: value}, default_flow_style=style, width=sys.maxsize).rstrip()
            yield f"{indent}{line}  # {source}"
        if key == "model.overrides" and texts and not hidden:
            yield from _not_overridden(values)
    if hidden and not path:
        yield from ("", "# `zeroclap show --all` also prints the advanced settings.")


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
