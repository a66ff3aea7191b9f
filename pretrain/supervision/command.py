"""The command that trains a run to its end: supervise."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config.settings import add_recipe
from pretrain.records.exit_codes import EXIT_DONE

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig
    from pretrain.model.config import ModelConfig
    from pretrain.supervision.nodes import Node


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
    from pretrain.checks.recipe import check, data_summary
    from pretrain.checks.resume import refuse_other_recipe
    from pretrain.convert.recipe import load_complete
    from pretrain.records import folder, fork
    from pretrain.records.metrics import METRICS
    from pretrain.records.report import write_report
    from pretrain.records.status import view
    from pretrain.supervision import hosts, jobs
    from pretrain.supervision.agent import Agent
    from pretrain.supervision.launch import world_size
    from pretrain.supervision.nodes import Node, this_node
    from pretrain.supervision.reach import connect
    from pretrain.supervision.supervisor import Supervisor, forecast

    config, architecture = load_complete(options.recipe, options.overrides)
    sys.stdout.write(architecture)
    node = this_node(options.node_rank, options.nodes, options.master_addr, os.environ)
    config, machines = hosts.resolve(config, node)
    if machines:
        node = Node(0, len(machines), machines[0])
    ranks = world_size(config.supervision, node.count)
    model, manifests = check(config, ranks)
    refuse_other_recipe(config, manifests)
    if config.model.init_from and node.rank == 0:
        from pretrain.convert import init_from

        manifest = next(iter(manifests.values()))
        sys.stdout.write(f"{init_from.check_initial_model(config, model, manifest)}\n")
    _check_machine(config, model, ranks, node)
    sys.stdout.writelines(f"{sentence}\n" for sentence in data_summary(config))
    if options.dry_run:
        sys.stdout.write(forecast(config, node))
        return EXIT_DONE
    if node.rank:
        return Agent(config, node).run()
    run = Path(config.folder)
    if machines:
        wait_seconds = config.supervision.node_wait_seconds
        node = connect(machines, run, wait_seconds, lambda text: jobs.write_stdout(f"{text}\n"))
    sys.stdout.write(folder.writable_by_others(run))
    folder.check_corpora(config, manifests)
    fork.take_alone(config)
    code = Supervisor(config, node, machines=machines, renews=sys.stdout.isatty()).run()
    try:
        if (run / METRICS).exists():
            sys.stdout.write(f"report: {write_report(run)}\n")
        sys.stdout.write("".join(f"{line}\n" for line in view(run).pointers()))
    except (OSError, ValueError) as error:  # the run's own exit code counts
        sys.stderr.write(f"{options.parser.prog}: no report: {error}\n")
    return code


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


def _check_machine(config: RunConfig, model: ModelConfig, ranks: int, node: Node) -> None:
    """Refuse a run that this machine's devices, memory or disk cannot hold; warn if it is tight."""
    from pretrain.checks import capacity
    from pretrain.checks.needs import least_states
    from pretrain.checks.recipe import refuse_device
    from pretrain.processes import gpus
    from pretrain.supervision import launch

    parameters, device_bytes, host_bytes = least_states(config, model, ranks)
    capability = min((gpu.capability for gpu in gpus.describe()), default=None)
    refuse_device(config, ranks, launch.device_type(os.environ), capability)
    for text in capacity.check_memory(device_bytes, host_bytes, ranks // node.count):
        sys.stdout.write(f"WARNING: {text}\n")
    if node.rank == 0:
        capacity.refuse_small_disk(config, parameters)


COMMANDS = {"supervise": (add_arguments, supervise), "profile": (add_profile_arguments, profile)}
