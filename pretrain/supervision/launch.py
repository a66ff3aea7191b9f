"""How an attempt is launched on a node: its control file, command line, environment and process.

A new supervisor or agent adopts an attempt that outlived the one before, so no step is lost.
"""

import base64
import contextlib
import dataclasses
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from data_prep.common import children, files
from pretrain.config.run import RunConfig
from pretrain.config.sections import SupervisionConfig
from pretrain.processes import gpus, processes
from pretrain.processes.launching import free_port
from pretrain.records import control, ledger
from pretrain.records.control import ControlFile
from pretrain.records.folder import SUPERVISED
from pretrain.supervision.nodes import Node

_IGNORING_STOPS = ("/bin/sh", "-c", 'trap "" USR1; exec "$0" "$@"')
"""Lets SIGUSR1 reach the ranks alone, which set a handler; it would kill their launcher.

Slurm sends it to every process of a job step where it tracks them by their parents
(proctrack/linuxproc). A `preexec_fn` may hang where threads run."""


def world_size(config: SupervisionConfig, nodes: int) -> int:
    """Return the number of ranks of a launch."""
    return nodes * gpus.ranks_here(config.processes_per_node)


def command(run: Path, control_file: ControlFile, node: int = 0) -> list[str]:
    """Return the launcher's command line for an attempt on one node.

    Args:
        run: folder of the run.
        control_file: gives the address of rank 0, and the numbers of nodes and processes.
        node: number of this node.

    Raises:
        ValueError: There are too few GPUs.
    """
    options = [f"--world_info={_world(control_file, node)}", "--node_rank", str(node)]
    options += ["--master_addr", control_file.address, "--master_port", str(control_file.port)]
    options += ["--module", "pretrain.train", str(run / SUPERVISED)]
    return [sys.executable, "-u", "-m", "deepspeed.launcher.launch", *options]


def _world(control_file: ControlFile, node: int) -> str:
    """Return DeepSpeed's --world_info: the GPUs of every node, as JSON in base64.

    This is what the program `deepspeed` does on one machine or with --no_ssh (launcher/runner.py,
    `main`): it starts launcher/launch.py, and costs an import of torch and DeepSpeed before. A
    launcher writes its own node's into CUDA_VISIBLE_DEVICES, numbers or names (GPU-..., MIG-...);
    of the other nodes only their count matters.
    """
    default = list(range(control_file.processes_per_node))
    own = gpus.gpus_of(control_file.processes_per_node) or default
    nodes = range(control_file.nodes)
    world = {f"node-{number}": own if number == node else default for number in nodes}
    return base64.urlsafe_b64encode(files.strict_json(world).encode()).decode()


def next_control_file(
    config: RunConfig, node: Node, records: Sequence[ledger.Record]
) -> ControlFile:
    """Return the control file for a run's next attempt, with a new token, number and port.

    If a supervisor was killed right after a launch, the number of that launch is in no record but
    in its control file.
    """
    recorded = ledger.run_state(records).next_attempt
    before = control.read_control_file(Path(config.folder))
    count = gpus.ranks_here(config.supervision.processes_per_node)
    threads = max(1, children.usable_cores() // count)
    return ControlFile(
        token=secrets.token_hex(8),
        attempt=max(recorded, before.attempt + 1 if before else 0),
        state=control.RUN,
        nodes=node.count,
        processes_per_node=count,
        address=node.address,
        port=free_port(),
        device=gpus.device_type(),
        threads=os.environ.get("OMP_NUM_THREADS", str(threads)),
    )


def check_device(of_node_0: str) -> str:
    """Return the device of this machine's ranks, "cpu" or "cuda".

    Args:
        of_node_0: that of node 0's ranks.

    Raises:
        ValueError: They differ.
    """
    device = gpus.device_type()
    if device != of_node_0:
        raise ValueError(
            f"ranks here would use the {device}, those of node 0 the {of_node_0}; "
            "does nvidia-smi list the GPUs of both machines?"
        )
    return device


def environment(run: Path, control_file: ControlFile, node: int = 0) -> dict[str, str]:
    """Return the launcher's environment: this process's, and marks of the attempt's processes.

    On several nodes, ranks on CPUs get as many threads each as those of node 0, whatever a login
    sets elsewhere, so that a run on other machines computes the same numbers.

    Raises:
        ValueError: Ranks of this node would use another device than those of node 0.
    """
    device = check_device(control_file.device)
    result = children.environment()
    result[processes.RUN_VARIABLE] = processes.mark(run, node)
    result[control.TOKEN_VARIABLE] = control_file.token
    if device == "cpu":
        result["DS_ACCELERATOR"] = device  # DeepSpeed's own choice may be another
        if control_file.nodes > 1:
            result["OMP_NUM_THREADS"] = control_file.threads
    return result


@dataclasses.dataclass
class Job:
    """A launcher and all processes below it."""

    run: Path
    control_file: ControlFile
    """Of the attempt."""
    node: int
    """Number of this node."""
    process: psutil.Process
    """The launcher; a `psutil.Popen` if this process started it."""

    @property
    def log(self) -> Path:
        """File with the output of the launcher and its ranks."""
        return log_of(self.run, self.control_file, self.node)

    def ended(self) -> bool:
        """Return whether the launcher has ended; its ranks may still run."""
        return not processes.is_alive(self.process)

    def code(self) -> int | None:
        """Return the launcher's exit code; `None` while it runs and for an adopted launcher."""
        return self.process.poll() if isinstance(self.process, psutil.Popen) else None

    def end(self, grace_seconds: float) -> None:
        """End all its processes; see `processes.end_all`."""
        processes.end_all(self.run, grace_seconds, self.node, self.process.pid)
        if isinstance(self.process, psutil.Popen):
            self.process.wait()


def start(run: Path, control_file: ControlFile, node: int) -> Job:
    """Launch an attempt on this node, in a session of its own.

    Args:
        run: folder of the run.
        control_file: describes the attempt.
        node: number of this node.

    Raises:
        ValueError: There are too few GPUs.
    """
    log = log_of(run, control_file, node)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
        process = psutil.Popen(
            [*_IGNORING_STOPS, *command(run, control_file, node)],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(run, control_file, node),
            start_new_session=True,
        )
    return Job(run, control_file, node, process)


def find(run: Path, control_file: ControlFile | None, node: int = 0) -> Job | None:
    """Return the launcher of the attempt that should be running, if it runs on this node.

    Of the processes that lead a session, the launcher is the oldest.
    """
    if control_file is None or control_file.state != control.RUN:
        return None
    leaders: list[psutil.Process] = []
    for member in processes.members(run, node):
        if member.rank is None and control.token_of(member.environment) == control_file.token:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(member.pid) == member.pid:
                    leaders.append(member.process)
    leader = min(leaders, key=psutil.Process.create_time, default=None)
    return Job(run, control_file, node, leader) if leader else None


def log_of(run: Path, control_file: ControlFile, node: int = 0) -> Path:
    """Return the file with the output of an attempt's launcher and ranks on a node."""
    suffix = f"-node-{node:03d}" if node else ""
    return run / "logs" / f"attempt-{control_file.attempt:03d}{suffix}.log"
