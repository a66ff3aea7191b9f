"""The command that trains a run to its end: supervise."""

import argparse
import os

from data_prep.common import console
from pretrain.config.settings import add_recipe


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `supervise`."""
    add_recipe(command)
    add = command.add_argument
    source = (
        "apply a changed recipe from this step on; or continue in a new folder "
        "from a checkpoint of another run"
    )
    add("--from", dest="source", metavar="[RUN@]STEP", help=source)
    add("--dry-run", action="store_true", help="print what would be done next, and do nothing")
    nodes = "number of nodes, each of which runs this command (default: Slurm's, or 1)"
    add("--nodes", type=int, help=nodes)
    add("--node-rank", type=int, help="number of this node; 0 leads (default: Slurm's, or 0)")
    add("--master-addr", help="address of node 0 (default: its host name)")


def supervise(options: argparse.Namespace) -> int:
    """Train a run to its end: launch it, roll it back from loss spikes, relaunch it.

    example: zeroclap supervise pile-base data.corpus=corpora/pile folder=runs/base
    """
    from pretrain.config.load import load
    from pretrain.records.segments import Source
    from pretrain.supervision.nodes import this_node
    from pretrain.supervision.run import run_supervised

    config = load(options.recipe, options.overrides)
    node = this_node(options.node_rank, options.nodes, options.master_addr, os.environ)
    source = Source.parse(options.source) if options.source else None
    with console.survive_broken_pipe(is_result=options.dry_run):
        return run_supervised(config, node, source=source, is_dry_run=options.dry_run)


COMMANDS = {"supervise": (add_arguments, supervise)}
