"""The command that checks the machines of a run before it starts: preflight."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED
from pretrain.processes import launching, processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pretrain.config.run import RunConfig
    from pretrain.preflight.judge import Needs
    from pretrain.supervision.jobs import Job
    from pretrain.supervision.nodes import Node

MODULE = "pretrain.preflight.measure"
_RECIPE = "pile-base"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `preflight`."""
    add = command.add_argument
    recipe = f"a YAML file, or the name of one in pretrain/recipes (default: {_RECIPE})"
    add("recipe", nargs="?", default=_RECIPE, help=recipe)
    overrides = "settings to change, such as supervision.launcher=torchrun"
    add("overrides", nargs="*", default=[], metavar="key=value", help=overrides)
    hostfile = "file of machines, such as `gpu-1 slots=8`; as supervision.hostfile=FILE"
    add("--hostfile", metavar="FILE", help=hostfile)
    seconds = "time after which a measurement counts as hanging (default: %(default)g)"
    add("--seconds", type=float, default=300.0, help=seconds)


def preflight(options: argparse.Namespace) -> int:
    """Check the machines of a run before it starts: devices, memory, disk, and their connection.

    The launcher of the recipe starts its ranks. They measure a matrix product, an all-reduce, and
    writing to the disk of the run's folder, and print versions and free memory. The machines of a
    hostfile are first asked over ssh for their versions and for the run's folder. Nothing is left
    there. The exit code is 1 if something is wrong, with the reason; speeds are only shown.

    example: python -m pretrain preflight --hostfile hosts pile-base folder=runs/base
    """
    from pretrain.checks import capacity
    from pretrain.checks.recipe import refuse_device
    from pretrain.convert.recipe import load_complete
    from pretrain.preflight.judge import problems, table
    from pretrain.preflight.measure import read_answers
    from pretrain.processes import gpus
    from pretrain.supervision import hosts, jobs, launch
    from pretrain.supervision.nodes import Node
    from pretrain.supervision.reach import connect

    recipe, overrides = options.recipe, options.overrides
    if "=" in recipe:
        recipe, overrides = _RECIPE, [recipe, *overrides]
    if options.hostfile:
        overrides = [*overrides, f"supervision.hostfile={options.hostfile}"]
    config, architecture = load_complete(recipe, overrides)
    sys.stdout.write(architecture)
    config, machines = hosts.resolve(config, Node())
    count = len(machines) or 1
    launch.check(config.supervision)
    ranks = launch.world_size(config.supervision, count)
    device = launch.device_type(os.environ)
    capability = min((gpu.capability for gpu in gpus.describe()), default=None)
    refuse_device(config, ranks, device, capability)
    needs = _needs(config, ranks, device == "cuda")
    near = capacity.existing_folder(Path(config.folder))
    corpora = [stream.path for stream in config.streams if Path(stream.path).exists()]
    node = connect(machines, near, 0.0, jobs.write_stdout, corpora) if machines else Node()
    with tempfile.TemporaryDirectory(prefix=".preflight-", dir=near) as name:
        folder = Path(name)
        job, hint = _ask(config, folder, options.seconds, node, machines)
        answers, log = read_answers(folder, ranks), launching.tail(job.log)
    sys.stdout.write(table(answers))
    found = problems(answers, needs)
    if any(answer.stopped_in for answer in answers) or len(answers) < ranks:
        sys.stdout.write(f"\n{hint}; the end of the launcher's log:\n{log}")
    for text in found:
        sys.stdout.write(f"PROBLEM: {text}\n")
    if not found:
        sys.stdout.write("no problems found\n")
    return EXIT_FAILED if found else EXIT_DONE


def _ask(
    config: RunConfig, folder: Path, seconds: float, node: Node, machines: Sequence[str]
) -> tuple[Job, str]:
    """Start the ranks, wait for their end, and end what is left; returns how they ended."""
    from pretrain.config.load import dump
    from pretrain.records import control
    from pretrain.records.folder import SUPERVISED
    from pretrain.supervision import hosts, jobs, launch
    from pretrain.supervision.nodes import OtherNodes

    config = dataclasses.replace(config, folder=str(folder))
    settings = config.supervision
    control.folder_of(folder).mkdir()
    dump(config, folder / SUPERVISED)
    silence_seconds = settings.node_silence_seconds
    agents = hosts.Agents(machines, folder, jobs.write_stdout, silence_seconds)
    others = OtherNodes(folder, node.count, silence_seconds, start=agents.start)
    deadline = time.monotonic() + seconds
    with agents.kept(others, node.address):
        while others.unavailable() and time.monotonic() < deadline:
            time.sleep(0.5)
        control_file = launch.next_control_file(config, node, [])
        control_file = dataclasses.replace(control_file, module=MODULE, start=agents.start)
        control.write(folder, control_file)
        job = jobs.start(config, folder, control_file, 0)
        while not job.ended() and time.monotonic() < deadline:
            time.sleep(0.1)
        hint = f"the launcher {launching.describe_exit(job.code())}"
        if not job.ended():
            hint = f"not finished after {seconds:g} s"
        job.end(processes.GRACE_SECONDS)
        agents.dismiss()
        control.write(folder, dataclasses.replace(control_file, state=control.EXIT))
        agents.close(2 * processes.GRACE_SECONDS)
    return job, hint


def _needs(config: RunConfig, ranks: int, on_gpus: bool) -> Needs:
    """Return what a recipe needs; only what is known without a vocabulary if it has none."""
    from pretrain.checks.devices import DEVICES
    from pretrain.plan import plan as planning
    from pretrain.preflight.judge import Needs

    needs = Needs(ranks, on_gpus)
    corpora = [Path(stream.path).exists() for stream in config.streams]
    if not any(corpora):
        return needs
    planned = planning.plan(config, ranks, next(iter(DEVICES)))
    return dataclasses.replace(needs, device_bytes=planned.memory[planned.stage].on_device)


COMMANDS = {"preflight": (add_arguments, preflight)}
