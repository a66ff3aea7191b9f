"""The command that trains a run to its end: supervise."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pretrain.config.settings import add_recipe


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `supervise`."""
    add_recipe(command)
    add = command.add_argument
    add("--dry-run", action="store_true", help="print what would be done next, and do nothing")
    nodes = "number of nodes, each of which runs this command (default: Slurm's, or 1)"
    add("--nodes", type=int, help=nodes)
    add("--node-rank", type=int, help="number of this node; 0 leads (default: Slurm's, or 0)")
    add("--master-addr", help="address of node 0 (default: its host name)")


def supervise(options: argparse.Namespace) -> int:
    """Train a run to its end: launch it, roll it back from loss spikes, relaunch it.

    example: python -m pretrain supervise pile-base data.corpus=corpora/pile folder=runs/base
    """
    from pretrain.convert.recipe import load_complete
    from pretrain.supervision.nodes import this_node
    from pretrain.supervision.run import run_supervised

    config, architecture = load_complete(options.recipe, options.overrides)
    sys.stdout.write(architecture)
    node = this_node(options.node_rank, options.nodes, options.master_addr, os.environ)
    return run_supervised(config, node, is_dry_run=options.dry_run)


def add_profile_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `profile`."""
    command.add_argument("run", type=Path, help="the run's folder")
    command.add_argument("--steps", type=int, default=5, help="number of steps (default: 5)")


def profile(options: argparse.Namespace) -> None:
    """Trace the next steps of a run that is being trained, for Perfetto.

    example: python -m pretrain profile runs/base --steps 5
    """
    from pretrain.config.sections import MOST_STEPS_PROFILED
    from pretrain.records import control
    from pretrain.records.status import TRAINING, view

    if not 1 <= options.steps <= MOST_STEPS_PROFILED:
        raise ValueError(f"--steps {options.steps}: accepted: 1 to {MOST_STEPS_PROFILED}")
    seen = view(options.run)
    begun = [record for record in seen.records if record["kind"] == "attempt"]
    if seen.activity != TRAINING or not begun:
        raise ValueError(
            f"{options.run}: is not being trained on this machine; it is {seen.activity}"
        )
    control.request_profile(options.run, begun[-1]["token"], options.steps)
    ranks = ", ".join(map(str, seen.config.profile.ranks))
    sys.stdout.write(
        f"attempt {begun[-1]['attempt']} was asked to trace {options.steps} steps of rank {ranks}; "
        f"its log will name the files in {options.run / 'profile'}\n"
    )


COMMANDS = {"supervise": (add_arguments, supervise), "profile": (add_profile_arguments, profile)}
