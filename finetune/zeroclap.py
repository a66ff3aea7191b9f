"""The program `zeroclap COMMAND`: the commands of all packages, and shell completion."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data_prep.__main__ as data_prep
import finetune.__main__ as finetune
import pretrain.__main__ as pretrain
from data_prep.common import console
from data_prep.common.arguments import Command, Parser, program, run_command


@console.lasting()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_command(_parser(), arguments)


def _parser() -> Parser:
    description = "Pretrain and fine-tune language models, from raw text to a GLUE table."
    return program("zeroclap", description, "demo", GROUPS)


def _completion_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=("bash", "zsh"))


def _completion(options: argparse.Namespace) -> None:
    """Print a script that completes this program's commands and options in a shell.

    Write it to a file that ~/.bashrc sources; for zsh, to a file _zeroclap in a folder of $fpath.

    example: zeroclap completion bash
    """
    import shtab

    from finetune.tasks import TASKS
    from pretrain.config.load import RECIPES

    parser = _parser()
    (commands,) = parser._get_positional_actions()
    assert isinstance(commands.choices, dict)
    commands.help = "command"  # shtab leaves out what `--help` leaves out
    recipes = _names_or_files(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    for command in commands.choices.values():
        command.load()
        for action in command._actions:
            if action.dest == "tasks":
                action.choices = list(TASKS)
            elif action.dest == "recipe" and not action.choices:
                action.complete = recipes
            elif action.type is Path or action.metavar == "GLOB":
                action.complete = shtab.FILE
    sys.stdout.write(f"{shtab.complete(parser, options.shell)}\n")


def _names_or_files(names: Sequence[str]) -> dict[str, Any]:
    """Return what shtab completes an argument by: a shell function that it puts on top."""
    function, words = "_zeroclap_recipe_files", " ".join(names)
    bash = f"compgen -W '{words}' -- $1; compgen -f -- $1;"
    zsh = f"_alternative 'recipes:recipe:({words})' 'files:file:_files';"
    preamble = {"bash": f"{function}() {{ {bash} }}", "zsh": f"{function}() {{ {zsh} }}"}
    return {"bash": function, "zsh": function, "preamble": preamble}


_GROUPS: dict[str, dict[str, Command]] = {
    **data_prep.GROUPS,
    **pretrain.GROUPS,
    "fine-tune": finetune.COMMANDS,
    "": {"completion": (_completion_arguments, _completion)},
}
_SPECIALISTS = (
    *("replay", "bench"),
    *("submit", "birthplaces", "completion"),
)
"""Commands that a first run, and a first use of its model, do without."""
GROUPS = {
    title: {name: each for name, each in commands.items() if name not in _SPECIALISTS}
    for title, commands in _GROUPS.items()
    if title
} | {"for specialists": {n: c[n] for c in _GROUPS.values() for n in c if n in _SPECIALISTS}}
"""Every command, in the order of the work, and at the end those for specialists."""
