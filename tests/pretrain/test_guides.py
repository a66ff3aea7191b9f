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


def settings_table() -> str:
    """Every setting with its default and its documentation, as the guide has it."""
    whole = {
        name: entry
        for name, entry in recipe_schema()["properties"].items()
        if "$ref" not in entry and "anyOf" not in entry and name != "extends"
    }
    lines = ["### the whole run", "", "| setting | default | |", "|---|---|---|"]
    lines += [f"| `{n}` | {_default(entry)} | {_meaning(entry)} |" for n, entry in whole.items()]
    lines.append("")
    for section, entry in recipe_schema()["properties"].items():
        is_one_value = section in whole and "$ref" not in entry.get("items", {})
        if section == "extends" or is_one_value:
            continue
        lines += [f"### `{section}`", "", "| setting | default | |", "|---|---|---|"]
        lines += [
            f"| `{name}` | {_default(field)} | {_meaning(field)} |"
            for name, field in _fields(entry).items()
            if (section, name) != ("model", "overrides")
        ]
        lines += [
            f"| `corpora.NAME.{name}` | {_default(field)} | {_meaning(field)} |"
            for name, field in recipe_schema()["$defs"]["CorpusConfig"]["properties"].items()
            if section == "data"
        ]
        lines.append("")
    return "\n".join(lines)


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
        "the guide's table differs from pretrain/config/run.py; "
        "ZEROCLAP_WRITE_GUIDES=1 writes it anew"
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
