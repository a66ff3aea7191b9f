"""The command line: the parser of `zeroclap` and the way to run a command.

The program is a table of commands, in groups that `--help` shows in this order. A command is a
function that adds its arguments, which is called when the command is parsed, and one that runs it.
"""

import argparse
import difflib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from data_prep.common import console
from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from data_prep.common.files import described

AddArguments = Callable[["Parser"], None]
Run = Callable[[argparse.Namespace], int | None]
"""Runs a command and returns its exit code, None for success. Its docstring is the command's help:
a line that says what it does, and at the end an example. `options.parser.prog` is the command as
the user called it. It raises ValueError or OSError for errors that the user can correct, and
CommandFailed for work that did not succeed."""
Command = tuple[AddArguments, Run]
Groups = Mapping[str, Mapping[str, Command]]
"""Commands by name, by title of the group."""
_NAME = "zeroclap"
N = TypeVar("N", int, float)
_MOST_NUMBERS = 1000
"""Of an option that names several."""


class CommandFailed(Exception):
    """The work was tried and did not succeed: the exit code is EXIT_FAILED."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that refuses a second value for the same option, and infinite numbers.

    Options with action="extend" collect the values of all occurrences, and flags may be repeated.
    Sub-parsers are of the same class. The lines of a description stay as they are.
    """

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401
        add_arguments: AddArguments | None = None,
        **keywords: Any,  # noqa: ANN401
    ) -> None:
        """Create a parser.

        Args:
            arguments: Those of ArgumentParser.
            add_arguments: Called with the parser before it parses its first command line, so that
                a program's `--help` imports nothing that a command needs.
            keywords: Those of ArgumentParser.
        """
        super().__init__(*arguments, **keywords)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self._add_arguments = add_arguments
        self.given: set[str] = set()
        """Destinations of the options seen so far in the current command line."""
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def load(self) -> None:
        """Call `add_arguments`, if not done yet."""
        if self._add_arguments:
            self._add_arguments(self)
            self._add_arguments = None

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Parse a command line; every other parsing method calls this one."""
        self.load()
        self.given.clear()
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        """Suggest the nearest command in place of one that does not exist; refuse infinity."""
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentError(action, f"{value} is not a finite number")
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(value, action.choices, 1)
            hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"no command {value!r}; {hint}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit."""
        for kind, name in ("int", "whole number"), ("float", "number"):
            message = re.sub(f"invalid {kind} value: (.*)", rf"\1 is not a {name}", message)
        setting = re.match(r"unrecognized arguments: --(\w+\.[\w.]+)", message)
        hint = f"; a setting has no dashes: {setting[1]}=VALUE" if setting else ""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}{hint} (see {self.prog} -h)\n")


class _StoreOnce(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        if option_string is not None:  # not a positional argument
            if self.dest in parser.given:
                before = getattr(namespace, self.dest)
                raise argparse.ArgumentError(self, f"given twice ({before}, {values})")
            parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


def version() -> str:
    """Return the version of the installed package, or say where the code is that is not installed.

    pyproject.toml states the version.
    """
    import importlib.metadata

    try:
        return importlib.metadata.version("zeroclap")
    except importlib.metadata.PackageNotFoundError:
        return f"of unknown version: not installed, run from {Path(__file__).parents[2]}"


def program(groups: Groups) -> Parser:
    """Return the parser of the program with these commands."""
    lines = ["Pretrain and fine-tune language models, from raw text to a GLUE table."]
    usage, example = f"{_NAME} [-h] [--version] COMMAND ...", f"example: {_NAME} demo"
    parser = Parser(prog=_NAME, usage=usage, epilog=example)
    parser.add_argument("--version", action="version", version=f"{_NAME} {version()}")
    # argparse itself would list the commands without groups.
    added = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog=_NAME, help=argparse.SUPPRESS
    )
    for title, commands in groups.items():
        lines += ["", f"{title}:"]
        for name, (add_arguments, run) in commands.items():
            command = add_command(added, name, run, add_arguments)
            summary = str(command.description).partition("\n")[0]
            lines.append(f"  {name:<16} {summary.rstrip('.')}")
    parser.description = "\n".join(lines)
    return parser


def add_command(
    added: "argparse._SubParsersAction[Parser]",
    name: str,
    run: Run,
    add_arguments: AddArguments | None = None,
) -> Parser:
    """Add a command to those of a program, and return its parser.

    Args:
        added: The program's commands.
        name: Of the command.
        run: Runs it; its docstring is the command's help.
        add_arguments: Adds the command's arguments when it is parsed.
    """
    text = inspect.getdoc(run) or ""
    summary = text.partition("\n")[0].rstrip(".")
    command = added.add_parser(name, help=summary, description=text, add_arguments=add_arguments)
    command.set_defaults(run_command=run, parser=command)
    return command


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line whose list of positional arguments may stand around its options.

    argparse itself accepts the list only in one piece.
    """
    options, rest = parser.parse_known_args(arguments)
    several = [a for a in options.parser._actions if a.nargs in ("*", "+") and not a.option_strings]
    if unknown := [word for word in rest if word.startswith("-") or not several]:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for added in several:
        more = map(added.type or str, rest)
        setattr(options, added.dest, [*getattr(options, added.dest), *more])
    return options


@console.survive_broken_pipe()
def run_command(groups: Groups, arguments: Sequence[str] | None = None) -> int:
    """Parse a command line, by default this process's, run its command and return the exit code.

    An error that the user can correct, or a failure, is reported in one line.
    """
    name = _NAME
    try:
        options = parse_arguments(program(groups), arguments)  # may import what the command needs
        name = options.parser.prog
        code: int = options.run_command(options) or EXIT_DONE
        if code == EXIT_DONE:
            sys.stdout.flush()
    except (ValueError, OSError, CommandFailed) as error:
        message = described(error) if isinstance(error, OSError) else str(error)
        print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, CommandFailed) else EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def numbers(text: str, least: int = 0) -> list[int]:
    """Return the different whole numbers that an option names, such as 3-5 or 7,12.

    Raises:
        ArgumentTypeError: It names none, one twice, too many, or one that is less than `least` or
            has more than 12 digits.
    """
    named = list[int]()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,12})(?:\s*-\s*(\d{1,12}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        named += range(first, min(last, first + _MOST_NUMBERS) + 1) or [-1]
    if min(named) < least or len(set(named)) < len(named) or len(named) > _MOST_NUMBERS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write up to {_MOST_NUMBERS:,} different whole numbers of {least} or more "
            "and of at most 12 digits, as in 3-5 or 7,12"
        )
    return named


def at_least(least: int, kind: type[N] = int) -> Callable[[str], N]:
    """Return the type of an option that is a number of `least` or more."""

    def number(text: str) -> N:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: accepted: {least} or more")
        return value

    number.__name__ = kind.__name__  # argparse names it where `text` is no number
    return number
