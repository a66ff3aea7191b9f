"""The command that trains a run to its end: supervise."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pretrain.config.settings import add_recipe
from pretrain.exit_codes import EXIT_DONE


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `supervise`."""
    add_recipe(command)
    add = command.add_argument
    add("--dry-run", action="store_true", help="print what would be done next, and do nothing")
    nodes = "number of machines, each of which runs this command (default: Slurm's, or 1)"
    add("--nodes", type=int, help=nodes)
    add("--node-rank", type=int, help="number of this machine; 0 leads (default: Slurm's, or 0)")
    add("--master-addr", help="address of machine 0 (default: its host name)")


def supervise(options: argparse.Namespace) -> int:
    """Train a run to its end: launch it, roll it back from loss spikes, relaunch it.

    example: python -m pretrain supervise pile-base data.corpus=corpora/pile folder=runs/base
    """
    from pretrain.config.load import load
    from pretrain.preflight import check, data_summary, refuse_other_recipe
    from pretrain.run.metrics import METRICS
    from pretrain.run.report import write_report
    from pretrain.supervision.agent import Agent
    from pretrain.supervision.launch import world_size
    from pretrain.supervision.nodes import this_node
    from pretrain.supervision.supervisor import Supervisor, forecast

    config = load(options.recipe, options.overrides)
    node = this_node(options.node_rank, options.nodes, options.master_addr, os.environ)
    _, manifest = check(config, world_size(config.supervision, node.count))
    refuse_other_recipe(config, manifest)
    sys.stdout.writelines(f"{sentence}\n" for sentence in data_summary(config))
    if options.dry_run:
        sys.stdout.write(forecast(config, node))
        return EXIT_DONE
    if node.rank:
        return Agent(config, node).run()
    code = Supervisor(config, node).run()
    try:
        if (Path(config.folder) / METRICS).exists():
            sys.stdout.write(f"report: {write_report(Path(config.folder))}\n")
    except (OSError, ValueError) as error:  # the run's own exit code counts
        sys.stderr.write(f"{options.parser.prog}: no report: {error}\n")
    return code
