"""The guides: what they say about settings and files is what the code has.

Their commands are run by tests/walks/test_guides.py.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.command import recipe_schema

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("pretrain/*/*.md")]
RECIPE_GUIDE = ROOT / "pretrain" / "guides" / "writing-a-recipe.md"
OVERRIDES = """### `model.overrides`

The defaults are those of `model.size=base` and `model.variant=baseline`; `zeroclap recipes` lists what other sizes and
variants change. [Choosing a model](choosing-a-model.md) explains position methods, the shapes of ALiBi and latents.
"""  # noqa: E501


def settings_table() -> str:
    """Every setting with its default and its documentation, as the guide has it."""
    schema = recipe_schema()
    sections = schema["properties"]
    whole = {
        name: entry
        for name, entry in sections.items()
        if "$ref" not in entry and "anyOf" not in entry
    }
    lines = ["### the whole run", "", *_table(whole)]
    for section, entry in sections.items():
        is_one_value = section in whole and "$ref" not in entry.get("items", {})
        if is_one_value:
            continue
        lines.append(f"### `{section}`\n")
        if section == "objective":
            lines += _objective_tables(entry)
        elif section == "model":
            lines += _model_tables(_fields(entry))
        elif section == "data":
            corpora = schema["$defs"]["CorpusConfig"]["properties"]
            of_corpora = {f"corpora.NAME.{name}": field for name, field in corpora.items()}
            lines += _table({**_fields(entry), **of_corpora})
        else:
            lines += _table(_fields(entry))
    return "\n".join(lines)


def _objective_tables(entry: dict[str, Any]) -> Iterator[str]:
    """The name, then the other settings of each objective."""
    records = map(_fields, entry["anyOf"])
    objectives = {fields["name"]["const"]: fields for fields in records}
    masked = objectives["masked-lm"]
    name = {"description": entry["description"], "enum": list(objectives)}
    yield from _table({"name": masked["name"] | name})
    for objective, fields in objectives.items():
        own = {key: field for key, field in fields.items() if key != "name"}
        yield f"#### `{objective}`\n"
        if not own:
            yield "No other settings.\n"
        elif objective == "sentence-pairs":
            inherited = {key: own.pop(key)["default"] for key in masked if key != "name"}
            assert all(masked[key]["default"] == default for key, default in inherited.items())
            yield "Those of `masked-lm`, where `z_loss` must be 0, and:\n"
        if own:
            yield from _table(own)


def _model_tables(fields: dict[str, Any]) -> Iterator[str]:
    """The section, then the fields of ModelConfig that `model.overrides` may set."""
    overrides = fields["overrides"]["properties"]
    yield from _table({name: field for name, field in fields.items() if name != "overrides"})
    yield OVERRIDES
    # The objective decides on the pair head.
    yield from _table({name: each for name, each in overrides.items() if name != "pair_head"})


def _table(fields: dict[str, Any]) -> Iterator[str]:
    yield "| setting | default | |\n|---|---|---|"
    for name, field in fields.items():
        assert _meaning(field), f"{name} has no documentation"
        yield f"| `{name}` | {_default(field)} | {_meaning(field)} |"
    yield ""


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    records = recipe_schema()["$defs"]
    entry = entry.get("items", entry)
    (first, *_) = [entry, *entry.get("anyOf", ())] if "$ref" in entry else entry["anyOf"]
    fields: dict[str, Any] = records[first["$ref"].rpartition("/")[2]]["properties"]
    return fields


def _default(field: dict[str, Any]) -> str:
    value = field.get("default", field.get("const", ""))
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) and value else f"{value!s}"


def _meaning(field: dict[str, Any]) -> str:
    text = " ".join(field.get("description", "").split()).replace("|", "\\|")
    names = ", ".join(f"`{name}`" for name in field.get("enum", ()))
    return f"{text} One of {names}." if names else text


def test_the_guide_lists_every_setting_with_its_default_and_documentation() -> None:
    text = RECIPE_GUIDE.read_text()
    before, heading, _ = text.partition("## Every setting\n\n")
    expected = before + heading + settings_table()
    if os.environ.get("ZEROCLAP_WRITE_GUIDES"):
        RECIPE_GUIDE.write_text(expected)
    assert RECIPE_GUIDE.read_text() == expected, (
        "the guide's tables differ from the settings in the code; "
        "ZEROCLAP_WRITE_GUIDES=1 writes them anew"
    )


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                yield page, target


@pytest.mark.parametrize(
    ("page", "target"),
    [pytest.param(*link, id=f"{link[0].relative_to(ROOT)}:{link[1]}") for link in links()],
)
def test_links_between_pages_lead_somewhere(page: Path, target: str) -> None:
    assert (page.parent / target).exists()
