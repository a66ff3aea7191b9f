"""Settings as a user writes them: YAML, `key=value` overrides, and options of the command line.

Pretraining and fine-tuning share it. Numbers are those of YAML 1.2: 1e-3 is one, 010 is ten.
"""

import argparse
import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*|(?=[eE])))([eE][-+]?[0-9]+)?$"
        r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}
"""Numbers of YAML 1.2. PyYAML has those of 1.1: 1e-3 is text, 010 is 8, and 12:30 is 750."""


def add_recipe(command: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that loads a recipe: its name, and overrides."""
    command.add_argument("recipe", help="a YAML file, or the name of one in pretrain/recipes")
    overrides = "settings to change, such as optimizer.learning_rate=1e-4"
    command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=overrides)


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the option --device of a command that runs a model (see `distributed.choose_device`)."""
    command.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: GPUs where there are any, else the CPU)"
    )


def named_file(what: str, name: str, folder: Path, suffix: str) -> Path:
    """Return the file with a path, or else with a name in one of the project's folders.

    Raises:
        ValueError: there is none; begins with `what`, and lists the known names.
    """
    for path in (Path(name), folder / f"{name}{suffix}"):
        if path.is_file():
            return path
    names = sorted(path.stem for path in folder.glob(f"*{suffix}"))
    near = difflib.get_close_matches(name, names, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"{what} {name!r}{hint} is neither a file nor one of {', '.join(names)}")


def parse(text: str, source: str) -> Any:  # noqa: ANN401 - any YAML value
    """Parse YAML.

    Raises:
        ValueError: the text is not valid YAML, or has a key twice; `source` is named.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except RecursionError:
        raise ValueError(f"{source}: is nested too deeply") from None
    # Tags such as !!int raise what int() and the like raise.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        hint = " (indent with spaces; YAML allows no tabs there)" if "'\\t'" in str(error) else ""
        raise ValueError(f"{source}: is not valid YAML{hint}: {error}") from error


def to_yaml(values: object, **form: Any) -> str:  # noqa: ANN401 - PyYAML's options
    """Return YAML that `parse` reads back, in the order of the keys."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, **form)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is not text or stands twice in a mapping, and merged mappings.

    A value that contains itself is refused, too, by constructing what is inside it first.
    """

    def construct_object(self, node: Any, deep: bool = True) -> Any:  # noqa: ANN401, ARG002
        return super().construct_object(node, deep=True)

    def flatten_mapping(self, node: Any) -> None:  # noqa: ANN401 - PyYAML has no types
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                raise ValueError(f"line {line}: << is not read; a recipe extends another one")
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {line}: a key must be a text")
            name = (key.tag, str(key.value))
            if name in lines:
                raise ValueError(f"{key.value} is given twice (lines {lines[name]} and {line})")
            lines[name] = line


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read as a number."""


def _int(_: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value, 0 if node.value[1:2].isalpha() else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
for _kind in (_Loader, _Dumper):
    for _tag, _pattern in _NUMBERS.items():
        _kind.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
    for _found in _kind.yaml_implicit_resolvers.values():  # a date is a text: a folder's name
        _found[:] = [
            (tag, pattern)
            for tag, pattern in _found
            if pattern is _NUMBERS.get(tag, pattern) and not tag.endswith(":timestamp")
        ]


def override(key: str, value: object) -> str:
    """Return the override that sets a key to a value, with quotes where YAML needs them."""
    # In a list, because YAML ends a text that stands alone with a line "...".
    is_shown = str(value).isprintable()  # PyYAML misreads U+0085 in what it wrote itself
    line = to_yaml([value], default_flow_style=True, allow_unicode=is_shown, width=math.inf)
    return f"{key}={line.strip()[1:-1]}"


def merge(base: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `delta` in place of its own, section by section."""
    merged = dict(base)
    for key, value in delta.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


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


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set the key that an override such as "optimizer.learning_rate=1e-4" names, in place.

    Raises:
        ValueError: the override has no "=", or names a key below a value.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ValueError(f"{override!r}: write section.key=value, without spaces")
    *sections, key = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{override!r}: {section} is a value, not a section")
    value, text = parse(text, override), text.strip()
    # A word of a command line has no comments: `runs/a #2` is not `runs/a`.
    is_plain = isinstance(value, str) and value and text.startswith(value)
    values[key] = text if is_plain else value
