"""The commands `recipes`, `show`, `plan` and `bench`."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from data_prep.common.arguments import at_least
from data_prep.common.files import check_writable, write_json
from pretrain.checks.devices import DEVICES
from pretrain.config.settings import add_recipe

_HERE = "here"
_SECONDS = 5.0
_MICRO_BATCHES = 4
"""Of a rank in an update that `plan` measures, so that the optimizer's share is small."""


def recipes(options: argparse.Namespace) -> None:  # noqa: ARG001
    """List the recipes, and the accepted values of settings that take a name.

    example: zeroclap recipes
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

    The output is a recipe of the same run. If it names no folder, its folder is named after the
    file in which you save it. Fields of the model that follow from its size and variant are
    comments.

    example: zeroclap show pile-large model.variant=zero-clap --changed
    """
    from pretrain.plan.recipe_lines import show as lines_of

    lines = lines_of(
        options.recipe, options.overrides, only_changed=options.changed, every=options.all
    )
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    add_recipe(command)
    add = command.add_argument
    gpus = (
        "total number of GPUs (default: the most, up to 8, that share an update's micro-batches "
        f"evenly; with --kind {_HERE} the ranks that `supervise` starts on this machine)"
    )
    add("--gpus", type=at_least(1), help=gpus)
    kind = f"type of GPU (default: %(default)s); {_HERE}: measure this machine for some seconds"
    add("--kind", default="h100", choices=(*DEVICES, _HERE), help=kind)
    add("--json", type=Path, help="also write the figures to this file")


def plan(options: argparse.Namespace) -> None:
    """Estimate the cost of a run: parameters, memory, hours, checkpoints.

    example: zeroclap plan pile-base data.corpus=corpora/pile --gpus 8 --kind h100
    """
    from pretrain.checks.recipe import check_recipe, check_settings
    from pretrain.config.load import load
    from pretrain.plan import plan as planning
    from pretrain.processes.gpus import ranks_here

    config = load(options.recipe, options.overrides)
    is_here, here = options.kind == _HERE, ranks_here(config.supervision.processes_per_node)
    gpus = options.gpus
    if gpus is None:
        gpus = here if is_here else planning.most_gpus(config)
    corpora = [Path(source.path) for source in config.segments.sources]
    missing = [str(corpus) for corpus in corpora if not corpus.exists()]
    if missing:
        sys.stderr.write(f"note: {missing[0]}: no such folder on this machine\n")
    has_corpora = corpora and not missing
    (check_recipe if has_corpora else check_settings)(config, gpus)
    check_writable(options.json)
    measured = None
    if is_here:
        from pretrain.plan import speed

        measured = speed.measure_launch(config, min(gpus, here), _SECONDS, _MICRO_BATCHES)
    planned = planning.plan(config, gpus, options.kind, measured)
    if config.model.init_from:
        from pretrain.convert import initial_weights

        sys.stdout.write(f"{initial_weights.described(config, planning.model_of(config))}\n")
    sys.stdout.write(planning.table(planned))
    if options.json:
        write_json(options.json, dataclasses.asdict(planned))


def add_bench_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`."""
    add_recipe(command)
    add = command.add_argument
    seconds = "seconds to train after two updates of warm-up (default: %(default)s)"
    add("--seconds", type=at_least(0, float), default=10.0, help=seconds)
    add("--json", type=Path, help="also write the figures to this file")


def bench(options: argparse.Namespace) -> None:
    """Measure a recipe on this machine: tokens/s, MFU and memory.

    Trains on random tokens, so that no corpus is needed. On several GPUs: `deepspeed
    --no_local_rank --module finetune.zeroclap bench RECIPE`.

    example: zeroclap bench pile-base --json bench.json
    """
    from pretrain.checks.recipe import check_settings
    from pretrain.config.load import load
    from pretrain.plan import speed

    config = load(options.recipe, options.overrides)
    check_settings(config, int(os.environ.get("WORLD_SIZE", "1")))
    check_writable(options.json)
    measured = speed.measure(config, options.seconds)
    if measured is None:  # on other ranks than the first
        return
    sys.stdout.write(speed.table(measured))
    if options.json:
        write_json(options.json, dataclasses.asdict(measured))


COMMANDS = {
    "recipes": (lambda command: None, recipes),
    "show": (add_show_arguments, show),
    "plan": (add_plan_arguments, plan),
    "bench": (add_bench_arguments, bench),
}
