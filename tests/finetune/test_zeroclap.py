"""The program `zeroclap`, and what the command lines of all packages share."""

import argparse
import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest

from data_prep.common import arguments, children
from finetune import demo, zeroclap
from pretrain.config.settings import add_recipe
from tests.running import ROOT

PARSER = arguments.program(zeroclap.GROUPS)
NAMES = [name for commands in zeroclap.GROUPS.values() for name in commands]


def help_of(main, words, capsys):
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert not end.value.code
    return capsys.readouterr().out


def test_the_demo_may_have_any_folder():
    _, tokenizer, prepare, *_ = demo.stages(Path("it's [1]"), 1).values()
    for words in (tokenizer, prepare):
        assert "it's [[]1]/text/*.jsonl.zst" in shlex.split(words)


def found(pattern, text):
    return re.findall(pattern, text, flags=re.MULTILINE)


def test_help_groups_all_commands_in_the_order_of_the_work(capsys):
    assert len(NAMES) == len(set(NAMES)) > 20  # no name stands in two packages
    shown = help_of(zeroclap.main, [], capsys)
    titles = ["prepare data:", "pretrain:", "use a model:", "fine-tune:"]
    assert found(r"^[a-z -]+:$", shown)[:4] == titles
    assert found(r"^  ([a-z-]+)  ", shown)[: len(NAMES)] == NAMES


def test_help_of_each_command_has_an_example_that_parses(capsys):
    for words in ([], *([name] for name in NAMES)):
        shown = help_of(zeroclap.main, words, capsys)
        assert not found("default: (?:None|False)", shown)
        (example,) = found("^example: (.*)$", shown)
        assert example.startswith(" ".join(["zeroclap", *words]))
        options = arguments.parse_arguments(PARSER, shlex.split(example)[1:])
        assert not words or [options.command] == words


def test_version_is_that_of_the_installed_package_or_names_the_folder(monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    expected = importlib.metadata.version("zeroclap")
    assert help_of(zeroclap.main, ["--version"], capsys) == f"zeroclap {expected}\n"
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert arguments.version() == f"of unknown version: not installed, run from {ROOT}"


@pytest.mark.parametrize("name", ["status", "verify", "glue-report"])
def test_errors_name_the_command_as_it_was_called(name, capsys):
    assert zeroclap.main([name, "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith(f"zeroclap {name}: error: /nowhere: ")


def test_numbers_of_an_option_are_different_and_whole():
    assert arguments.numbers("1-3,7") == [1, 2, 3, 7]
    assert len(arguments.numbers("1-1000")) == 1000
    for text in ("1,1", "a", "", "-1", "3-1", "1-3,2", "1-", "1-99999999999", "1-1001", "9" * 13):
        with pytest.raises(argparse.ArgumentTypeError, match="different whole numbers"):
            arguments.numbers(text)


def test_overrides_may_stand_anywhere_and_unknown_arguments_nowhere(capsys):
    def add_go(command):
        add_recipe(command)
        command.add_argument("--count", type=int)

    def add_stay(command):
        command.add_argument("run")

    commands = {"go": (add_go, add_go), "stay": (add_stay, add_stay)}
    parser = arguments.program({"commands": commands})
    assert parser.parse_args(["go", "a"]).overrides == []
    for words in (
        ["go", "a", "b=1", "c=2", "--count", "3"],
        ["go", "--count", "3", "a", "b=1", "c=2"],
        ["go", "a", "b=1", "--count", "3", "c=2"],
    ):
        options = arguments.parse_arguments(parser, words)
        assert (options.recipe, options.overrides, options.count) == ("a", ["b=1", "c=2"], 3)
    for words in (["go", "a", "--no"], ["stay", "run", "b=1"]):
        with pytest.raises(SystemExit):
            arguments.parse_arguments(parser, words)
        error = f"error: unrecognized arguments: {words[-1]} (see zeroclap {words[0]} -h)\n"
        assert capsys.readouterr().err == f"zeroclap {words[0]}: {error}"
    words = ["evaluate", "a", "--data", "c", "b"]
    assert arguments.parse_arguments(PARSER, words).model == [Path("a"), Path("b")]


def test_the_demo_runs_the_program_that_it_shows(tmp_path, monkeypatch, capsys):
    commands = []

    def start(words, **_):
        commands.append(words)
        raise InterruptedError

    monkeypatch.setattr(children, "start", start)
    monkeypatch.setattr("finetune.demo.MODULES", ["json"])  # all of them take seconds
    assert zeroclap.main(["demo", "--output", str(tmp_path / "demo")]) == 2
    assert "\n$ zeroclap sample --output " in capsys.readouterr().out
    assert commands[0][:2] == ["finetune.zeroclap", "sample"]
