"""No option of any command silently replaces an earlier value."""

import argparse

import pytest

from data_prep.common.arguments import Parser, parse_arguments, program
from finetune import zeroclap


def options():
    parser = program(zeroclap.GROUPS)
    (choices,) = [a.choices for a in parser._actions if isinstance(a.choices, dict)]
    for name, command in choices.items():
        command.load()
        for option in command._actions:
            if option.option_strings and not isinstance(option, argparse._HelpAction):
                title = f"{name} {option.option_strings[-1]}"
                yield pytest.param(parser, name, command, option, id=title)


def value_of(action):
    return str(next(iter(action.choices))) if action.choices else "2"


def required_arguments(command, option):
    """Return the arguments that the command requires in addition to the option."""
    arguments = [value_of(a) for a in command._actions if not a.option_strings and a.nargs != "*"]
    for action in command._actions:
        if action.required and action.option_strings and action is not option:
            arguments += [action.option_strings[-1], value_of(action)]
    for group in command._mutually_exclusive_groups:
        if group.required and option not in group._group_actions:
            arguments += [group._group_actions[0].option_strings[-1], "1"]
    return arguments


@pytest.mark.parametrize(("parser", "name", "command", "option"), [*options()])
def test_a_repeated_option_adds_or_is_refused(parser, name, command, option, capsys):
    spelling, others = option.option_strings[-1], required_arguments(command, option)
    flag = isinstance(option, argparse._StoreTrueAction)
    once = [spelling] if flag else [spelling, value_of(option)]
    parse_arguments(parser, [name, *others, *once])
    if flag:
        assert getattr(parse_arguments(parser, [name, *others, *once, *once]), option.dest) is True
    elif isinstance(option, argparse._ExtendAction):
        found = parse_arguments(parser, [name, *others, *once, spelling, "3", "4"])
        assert getattr(found, option.dest) == [value_of(option), "3", "4"]
    elif isinstance(option, argparse._AppendAction):
        found = parse_arguments(parser, [name, *others, *once, spelling, "3"])
        assert getattr(found, option.dest) == [value_of(option), "3"]
    else:
        with pytest.raises(SystemExit) as ended:
            parse_arguments(parser, [name, *others, *once, *once])
        assert ended.value.code == 2
        assert f"argument {spelling}: given twice (" in capsys.readouterr().err
        parse_arguments(parser, [name, *others, *once])  # a new command line


def test_key_value_overrides_may_repeat():
    found = parse_arguments(program(zeroclap.GROUPS), ["plan", "demo", "a=1", "--gpus", "2", "a=2"])
    assert found.overrides == ["a=1", "a=2"]


def test_groups_and_abbreviations_count_as_the_same_option(capsys):
    parser = Parser(prog="x")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--number", type=int, nargs="?", const=7)
    group.add_argument("--other")
    assert parser.parse_args(["--number"]).number == 7
    with pytest.raises(SystemExit):
        parser.parse_args(["--number", "--num", "3"])
    assert "argument --number: given twice (7, 3)" in capsys.readouterr().err
