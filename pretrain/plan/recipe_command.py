"""The commands about recipes: `recipes` lists them, `show` prints one with all its settings."""

from __future__ import annotations

import argparse
import sys

from pretrain.config.settings import add_recipe


def add_recipes_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `recipes`: none."""


def recipes(options: argparse.Namespace) -> None:  # noqa: ARG001
    """List recipes, and the names that their settings may have.

    example: python -m pretrain recipes
    """
    from pretrain.plan.recipe_lines import listing

    sys.stdout.write("".join(f"{line}\n" for line in listing()))


def add_show_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `show`."""
    add_recipe(command)
    amount = command.add_mutually_exclusive_group()
    changed = "print only settings that differ from their defaults, without documentation"
    amount.add_argument("--changed", action="store_true", help=changed)
    every = "also print advanced settings that have their defaults, and all fields of the model"
    amount.add_argument("--all", action="store_true", help=every)


def show(options: argparse.Namespace) -> None:
    """Print the settings of a run, with their documentation and where their values come from.

    What is printed is a recipe of the same run; without a folder of its own, it runs in the folder
    of the name that you save it under. Fields of the model that its size and variant decide are
    comments.

    example: python -m pretrain show pile-large model.variant=zero-clap --changed
    """
    from pretrain.plan.recipe_lines import show as lines_of

    lines = lines_of(
        options.recipe, options.overrides, only_changed=options.changed, every=options.all
    )
    sys.stdout.write("".join(f"{line}\n" for line in lines))


COMMANDS = {"recipes": (add_recipes_arguments, recipes), "show": (add_show_arguments, show)}
