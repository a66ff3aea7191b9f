"""Command-line parsing shared by all commands: lazy sub-commands, checks, and exit codes."""

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

EXIT_DONE = 0
EXIT_FAILED = 1
"""The work was tried and did not succeed, or a check found a problem."""
EXIT_USAGE = 2
"""The command line, or a file that it names, cannot be used."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C."""

AddArguments = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int | None]
"""Runs a command and returns its exit code, None for success. Its docstring is the command's help.
It raises ValueError or OSError for errors that the user can correct."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that refuses a second value for the same option.

    Options with action="extend" collect the values of all occurrences, and flags may be repeated.
    Sub-parsers are of the same class.

    A sub-parser with a `module` imports it when its command is parsed, so that the program's
    `--help` imports no command. The module defines `add_arguments(parser)` and `run(options)`,
    which returns the exit code.
    """

    def __init__(self, *arguments: Any, module: str = "", **keywords: Any) -> None:  # noqa: ANN401
        """Create a parser; arguments other than `module` are those of ArgumentParser."""
        super().__init__(*arguments, **keywords)
        self._module = module
        self.given: set[str] = set()
        """Destinations of the options seen so far in the current command line."""
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def load(self) -> None:
        """Import the module of this sub-command, if not done yet, and add its arguments."""
        if self._module:
            module = import_module(self._module)
            module.add_arguments(self)
            self.set_defaults(run_command=module.run)
            self._module = ""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Parse a command line; every other parsing method calls this one."""
        self.load()
        self.given.clear()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} -h)\n")


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
                raise argparse.ArgumentError(
                    self, f"given twice, as {before} and as {values}; accepted: once"
                )
            parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


def add_commands(
    parser: argparse.ArgumentParser, commands: Mapping[str, tuple[AddArguments, Run]]
) -> None:
    """Add sub-commands by name; what a command's function documents is its help."""
    added = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run) in commands.items():
        text = inspect.getdoc(run) or name
        command = added.add_parser(
            name,
            help=text.splitlines()[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(command)
        command.set_defaults(run_command=run)


def run_command(program: str, options: argparse.Namespace) -> int:
    """Run `options.run_command` and return its exit code; report a user error in one line."""
    name = f"{program} {options.command}"
    try:
        code: int = options.run_command(options) or EXIT_DONE
        if code == EXIT_DONE:
            sys.stdout.flush()
    except (ValueError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def check_workers(workers: int) -> None:
    """Raise ValueError if `workers` is not a positive number."""
    if workers < 1:
        raise ValueError(f"--workers {workers}: accepted: 1 or more")
