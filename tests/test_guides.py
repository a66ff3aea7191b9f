"""The documents: what they name exists, and they stay short.

tests/walks/test_guides.py runs their commands.
"""

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.common.arguments import Parser, parse_arguments, program
from data_prep.common.records import keys
from finetune.studies import study
from finetune.zeroclap import GROUPS
from pretrain.config.load import load
from pretrain.config.run import RunConfig
from pretrain.objectives.registry import SETTINGS_BY_NAME
from tests.running import ROOT

GUIDES = sorted(ROOT.glob("pretrain/guides/*.md"))
PACKAGES = [*ROOT.glob("*/README.md"), *ROOT.glob("tests/*/README.md")]
PAGES = [*ROOT.glob("*.md"), *PACKAGES, *GUIDES, *ROOT.glob("pretrain/notes/*.md")]
EACH_PAGE = pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]
)
INDENTED = r"(?<=\n\n)((?:    [^\n]+\n)+)"  # without an empty line before it, text of a list
BLOCK = re.compile(rf"^```(\w*)\n(.*?)^```$|{INDENTED}", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each block of code, fenced or indented."""
    for language, fenced, indented in BLOCK.findall(page.read_text()):
        yield language, fenced or indented


def spans(page: Path) -> list[str]:
    """The code within sentences."""
    return re.findall(r"`([^`]+)`", BLOCK.sub("", page.read_text()))


def called(text: str) -> Iterator[list[str]]:
    """The arguments of each `zeroclap` in a shell script."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("zeroclap "):
            words = shlex.split(line, comments=True)[1:]
            ends = (n for n, word in enumerate(words) if word in ("&", "&&", "|", "||", ";"))
            yield words[: next(ends, None)]


@EACH_PAGE
def test_a_command_of_a_block_is_accepted(page: Path) -> None:
    for _, text in blocks(page):
        for words in called(text):
            parse_arguments(program(GROUPS), words)


@EACH_PAGE
def test_commands_and_options_in_sentences_exist(page: Path) -> None:
    zeroclap = program(GROUPS)
    (commands,) = zeroclap._get_positional_actions()
    assert isinstance(commands.choices, dict)
    for text in spans(page):
        for name, *words in called(text):
            command = commands.choices.get(name, zeroclap)
            assert isinstance(command, Parser)
            assert command is not zeroclap or name.startswith("--"), text
            command.load()
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert options <= command._option_string_actions.keys(), text


@functools.cache
def settings() -> set[str]:
    """Every setting as `section.name`."""
    recipes = [{"objective": {"name": name}, "phases": [{}]} for name in SETTINGS_BY_NAME]
    found = {key for recipe in recipes for key, _ in keys(RunConfig, recipe)}
    return {key.replace("[0]", "") for key in found}


@EACH_PAGE
def test_a_setting_that_is_named_exists(page: Path) -> None:
    known = settings()
    sections = {name.partition(".")[0] for name in known if "." in name}
    named = re.compile(rf"(?<![\w./-])(?:{'|'.join(sections)})\.[a-z_]\w*(?:\.[a-z]\w*)*(?![\w(])")
    code = "\n".join([*(text for _, text in blocks(page)), *spans(page)])
    for name in named.findall(code):
        is_file = name.endswith((".json", ".safetensors", ".params"))
        assert is_file or name in known or name.startswith("data.corpora."), name


@EACH_PAGE
def test_a_recipe_or_study_is_accepted(page: Path, tmp_path: Path) -> None:
    file = tmp_path / "written.yaml"
    for language, text in blocks(page):
        if language == "yaml":
            file.write_text(text)
            study.load(str(file), toy=False) if text.startswith("title:") else load(str(file))


@EACH_PAGE
def test_a_file_of_the_project_that_is_named_exists(page: Path) -> None:
    assert len(spans(page)) == BLOCK.sub("", page.read_text()).count("`") // 2 > 4
    for name in spans(page):
        if re.fullmatch(r"[\w-]+/[\w/.-]+\.(py|sh|sbatch|yaml)", name):
            folders = (ROOT, ROOT / "pretrain", page.parent)
            assert any((folder / name).exists() for folder in folders), name


@EACH_PAGE
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            found = page.parent / name if name else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize(
    ("pages", "words"),
    [([ROOT / "README.md"], 1000), (GUIDES, 900), (PACKAGES, 600)],
    ids=["README", "guides", "packages"],
)
def test_a_page_is_short(pages: list[Path], words: int) -> None:
    assert len(pages) <= 12
    longest = max(pages, key=lambda page: len(page.read_text().split()))
    assert len(longest.read_text().split()) <= words, longest


def test_the_page_of_a_step_names_what_stands_in_its_files() -> None:
    readme = ROOT / "pretrain/README.md"
    rows = re.findall(r"^\| \[`(\w+)`\]\((\S+)\) \|", readme.read_text(), re.MULTILINE)
    assert len(rows) == 13
    for name, file in rows:
        text = (readme.parent / file).read_text()
        assert re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE), (name, file)


def test_every_guarantee_names_a_test() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "README.md").read_text())
    assert len(named) == 5
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in named if f"def {name}(" not in tests] == []
