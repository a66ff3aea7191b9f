"""A supervised run on one node: checks before the start, then the supervisor or an agent."""

import errno
import os
import sys
from pathlib import Path

from data_prep import manifest
from data_prep.common.exit_codes import EXIT_DONE
from pretrain.checks import capacity
from pretrain.checks.needs import least_states
from pretrain.checks.recipe import check, check_device, data_summary
from pretrain.checks.resume import check_deepspeed, check_run
from pretrain.config.deepspeed import path_of
from pretrain.config.run import RunConfig
from pretrain.model.config import ModelConfig
from pretrain.processes import gpus
from pretrain.records import control, folder, ledger, segments
from pretrain.records.metrics import METRICS
from pretrain.records.report import write_report
from pretrain.records.segments import Course, Source
from pretrain.records.status import view
from pretrain.supervision import hosts, launch, notify
from pretrain.supervision.agent import Agent, tell_refusal
from pretrain.supervision.nodes import Node
from pretrain.supervision.reach import connect
from pretrain.supervision.supervisor import Supervisor, forecast


def run_supervised(
    config: RunConfig,
    node: Node | None = None,
    *,
    source: Source | None = None,
    is_dry_run: bool = False,
) -> int:
    """Train a run to its end on this node, as supervisor or agent.

    Args:
        config: the recipe.
        node: this one; None: the only one.
        source: the step from which the recipe applies, if it replaces another one.
        is_dry_run: print what would be done next, and do nothing.

    Returns:
        The exit code.

    Raises:
        ValueError: the recipe, the run's folder, the corpus or this machine is refused.
    """
    node = node or Node()
    config, machines = hosts.resolve(config, node)
    if machines:
        node = Node(0, len(machines), machines[0])
    try:
        course = _check(config, source, node)
    except ValueError as error:
        if node.rank and not is_dry_run:
            tell_refusal(config, node.rank, str(error))
        raise
    if is_dry_run:
        sys.stdout.write(forecast(course, node))
        return EXIT_DONE
    if node.rank:
        return _agent(config, node.rank).run(goes_on=course.goes_on)
    run = Path(config.folder)
    state = ledger.run_state(ledger.read_ledger(run / ledger.FILE_NAME))
    if machines and (course.why or not state.is_done(config.training.steps)):
        files = [str(path_of(config.training.deepspeed))]
        files += [os.path.join(corpus, manifest.FILE_NAME) for corpus in course.manifests]
        node = connect(machines, config, files)
    folder.check_corpora(course.manifests)
    if course.goes_on:  # before the supervisor prints what is new in the ledger
        with folder.lock(run, folder.SUPERVISOR_LOCK), folder.lock(run):
            segments.begin(course)
    supervisor = Supervisor(config, node, machines)
    with control.StopRequests().counted():  # one that arrives as the end is shown changes nothing
        code = supervisor.run()
        _show_end(run)
    return code


def _agent(config: RunConfig, node: int) -> Agent:
    """Return the agent of this node; report to node 0 if the folder cannot be written."""
    try:
        return Agent(config, node)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            tell_refusal(config, node, str(error))
        raise


def _show_end(run: Path) -> None:
    """Write the report, and print its path and what to do next, also where there is no report."""

    def report() -> list[str]:
        return [f"report: {write_report(run)}"] if (run / METRICS).exists() else []

    for found in (report, lambda: view(run).pointers()):
        try:
            sys.stdout.write("".join(f"{line}\n" for line in found()))
        except (ImportError, OSError, ValueError) as error:  # the run's own exit code counts
            sys.stderr.write(f"zeroclap supervise: no report: {error}\n")


def _check(config: RunConfig, source: Source | None, node: Node) -> Course:
    """Check what can be checked before a start; return how the run goes on."""
    ranks = launch.world_size(config.supervision, node.count)
    model = check(config, ranks)
    course = check_run(config, source)
    check_deepspeed(config, ranks)
    if config.model.init_from and node.rank == 0:
        from pretrain.convert import initial_weights

        manifest = next(iter(course.manifests.values()))
        sys.stdout.write(f"{initial_weights.check_initial_model(config, model, manifest)}\n")
    _check_machine(config, model, ranks, node)
    sys.stdout.writelines(f"{sentence}\n" for sentence in data_summary(config, ranks))
    return course


def _check_machine(config: RunConfig, model: ModelConfig, ranks: int, node: Node) -> None:
    """Check that this machine has the devices, memory, disk and program; warn of tight memory."""
    gpus.gpus_of(ranks // node.count)
    parameters, device_bytes, host_bytes = least_states(config, model, ranks)
    device = gpus.device_type()
    check_device(config, ranks, device)
    if device == "cpu":
        capacity.check_cpu_time(config, model, ranks)
    for text in capacity.check_memory(device_bytes, host_bytes, ranks // node.count):
        sys.stdout.write(f"WARNING: {text}\n")
    if node.rank == 0:
        notify.check(config.notify.command)
        capacity.check_disk_space(config, parameters)
