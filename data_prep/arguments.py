"""The command lines' parser: a repeated option adds or is refused, and never silently replaces."""

import argparse
from collections.abc import Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose options with one value may be given once.

    An option that takes a list adds with action="extend"; flags may be repeated. Sub-parsers are of
    the same class.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:  # noqa: ANN401 - as its base
        """Take what ArgumentParser takes."""
        super().__init__(*arguments, **keywords)
        self.given: set[str] = set()
        """Destinations of the options given so far in the command line that is parsed."""
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Parse a command line; every way to parse one comes here."""
        self.given.clear()
        return super().parse_known_args(args, namespace)


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
