"""The command `recipes`: list recipes and names for their settings, or write their JSON schema."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def add_recipes_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `recipes`."""
    command.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="write the JSON schema of recipes to this file, for editors that complete YAML",
    )


def recipes(options: argparse.Namespace) -> int:
    """List recipes, and the names that their settings may have.

    With --schema, write the JSON schema of recipes. An editor with a YAML language server then
    completes, explains and checks a recipe whose first line names that file:

        # yaml-language-server: $schema=recipe.schema.json

    example: python -m pretrain recipes --schema recipe.schema.json
    """
    if options.schema:
        from pretrain.run.checkpoints import write_json

        write_json(options.schema, recipe_schema())
        sys.stdout.write(f"{options.schema}: JSON schema of recipes\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _listing()))
    return 0


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe's file: `RunConfig`, `extends`, and the fields of ModelConfig."""
    from data_prep.records import json_schema
    from pretrain.config.run import RunConfig
    from pretrain.model.config import CHOICES, POSITION_METHODS, ModelConfig

    model = json_schema(ModelConfig)
    del model["required"], model["properties"]["vocab_size"]
    for name, accepted in {"position": POSITION_METHODS, **CHOICES}.items():
        model["properties"][name]["enum"] = list(accepted)
    schema = json_schema(RunConfig)
    schema["$defs"]["ModelRecipe"]["properties"]["overrides"] = model
    extends = {"type": "string", "description": "Recipe whose values this one changes."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _listing() -> Iterator[str]:
    from pretrain.config.load import RECIPES
    from pretrain.model.presets import SIZES, VARIANTS
    from pretrain.objectives.registry import SETTINGS_BY_NAME

    yield "recipes (python -m pretrain supervise RECIPE key=value ...):"
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
    for key, names in _named_settings(recipe_schema()):
        if key not in tables and not key.startswith("model.overrides"):
            yield f"  {key:<34} {', '.join(names)}"


def _named_settings(schema: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the settings of which a schema lists the accepted names, with these."""
    records = schema["$defs"]

    def record(entry: Mapping[str, Any]) -> Mapping[str, Any]:
        found = records.get(entry.get("$ref", "").rpartition("/")[2], {"properties": {}})
        properties: Mapping[str, Any] = found["properties"]
        return properties

    for section, entry in schema["properties"].items():
        variants = [record(variant) for variant in entry.get("anyOf", ())]
        for fields in (record(entry), *variants):
            for name, field in fields.items():
                if "enum" in field:
                    yield f"{section}.{name}", field["enum"]
